// SPDX-License-Identifier: Apache-2.0
#include "lib/allocator/pickle.hpp"
#include "lib/allocator/snapshot_tree.hpp"

#include <evmm/allocator/snapshot.hpp>

#include <fmt/format.h>

#include <string>
#include <string_view>
#include <vector>

namespace evmm {

namespace {

/// Writes as it goes: a document of 100,000 events is large enough without a tree of it in memory.
class json_writer {
 public:
  void truth(bool value) { add(value ? "true" : "false"); }
  void integer(std::uint64_t value) { add(fmt::format_int(value)); }
  void integer(std::int64_t value) { add(fmt::format_int(value)); }
  void real(double value) { add(fmt::format("{}", value)); }
  void text(std::string_view value) {
    next();
    quote(value);
  }
  void key(std::string_view name) {
    text(name);
    text_ += ':';
    first_ = true;
  }
  void pair(std::uint64_t first, std::uint64_t second) {
    add(fmt::format("[{},{}]", first, second));
  }
  template <class Items>
  void dict(Items&& items) {
    open('{');
    items();
    close('}');
  }
  template <class Range, class Write>
  void list(const Range& range, Write&& write) {
    open('[');
    for (const auto& element : range) write(element);
    close(']');
  }
  void frames(const std::vector<stack_frame>& stack) {
    list(stack, [&](const stack_frame& frame) {
      dict([&] {
        key("name");
        text(frame.name);
        key("filename");
        text(frame.filename);
        key("line");
        integer(std::uint64_t{frame.line});
      });
    });
  }

  std::string finish() && { return std::move(text_); }

 private:
  void next() {
    if (!first_) text_ += ',';
    first_ = false;
  }
  void add(std::string_view value) {
    next();
    text_ += value;
  }
  void add(const fmt::format_int& value) { add(std::string_view(value.data(), value.size())); }
  void open(char bracket) {
    next();
    text_ += bracket;
    first_ = true;
  }
  void close(char bracket) {
    text_ += bracket;
    first_ = false;
  }

  void quote(std::string_view value) {
    text_ += '"';
    if (is_utf8(value)) {
      escape(value);
    } else {
      escape(valid_utf8(value));
    }
    text_ += '"';
  }
  void escape(std::string_view value) {
    for (const char c : value) {
      if (c == '"' || c == '\\') {
        text_ += '\\';
        text_ += c;
      } else if (static_cast<unsigned char>(c) < 0x20) {
        text_ += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
      } else {
        text_ += c;
      }
    }
  }

  std::string text_;
  bool first_ = true;  ///< no comma before what comes next
};

}  // namespace

std::string to_json(const allocator_snapshot& snapshot) {
  json_writer writer;
  snapshot_tree(writer).write(snapshot);
  return std::move(writer).finish();
}

}  // namespace evmm
