// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace [[gnu::visibility("default")]] evmm {

/// The bytes behind pickle's opcodes: those that plain data needs, and that the memory viewer's
/// reader knows.
namespace pickle_op {
constexpr unsigned char mark = '(';
constexpr unsigned char stop = '.';
constexpr unsigned char none = 'N';
constexpr unsigned char new_true = 0x88;
constexpr unsigned char new_false = 0x89;
constexpr unsigned char integer4 = 'J';
constexpr unsigned char integer1 = 'K';
constexpr unsigned char integer2 = 'M';
constexpr unsigned char long1 = 0x8a;
constexpr unsigned char long4 = 0x8b;
constexpr unsigned char real = 'G';
constexpr unsigned char text4 = 'X';
constexpr unsigned char text1 = 0x8c;
constexpr unsigned char text8 = 0x8d;
constexpr unsigned char empty_list = ']';
constexpr unsigned char list = 'l';
constexpr unsigned char append = 'a';
constexpr unsigned char appends = 'e';
constexpr unsigned char empty_dict = '}';
constexpr unsigned char dict = 'd';
constexpr unsigned char set_item = 's';
constexpr unsigned char set_items = 'u';
constexpr unsigned char empty_tuple = ')';
constexpr unsigned char tuple = 't';
constexpr unsigned char tuple1 = 0x85;
constexpr unsigned char tuple2 = 0x86;
constexpr unsigned char tuple3 = 0x87;
constexpr unsigned char put1 = 'q';
constexpr unsigned char put4 = 'r';
constexpr unsigned char get1 = 'h';
constexpr unsigned char get4 = 'j';
constexpr unsigned char memoize = 0x94;
constexpr unsigned char protocol = 0x80;
constexpr unsigned char frame = 0x95;
}  // namespace pickle_op

/// Writes plain data as Python's pickle, protocol 2. Texts are written once, and where `share` is
/// used larger things are too.
class pickle_writer {
 public:
  pickle_writer();

  void truth(bool value) { op(value ? pickle_op::new_true : pickle_op::new_false); }
  void integer(std::uint64_t value);
  void integer(std::int64_t value);
  void real(double value);
  /// What is not UTF-8 becomes U+FFFD. `value` must live as long as the writer.
  void text(std::string_view value);
  void key(std::string_view name) { text(name); }
  void pair(std::uint64_t first, std::uint64_t second);

  /// `items` writes keys and values in turn.
  template <class Items>
  void dict(Items&& items) {
    op(pickle_op::empty_dict);
    op(pickle_op::mark);
    items();
    op(pickle_op::set_items);
  }

  /// `write` writes each element of `range`.
  template <class Range, class Write>
  void list(const Range& range, Write&& write) {
    op(pickle_op::empty_list);
    std::size_t count = 0;
    for (const auto& element : range) {
      if (count == 0) op(pickle_op::mark);
      write(element);
      if (++count < k_batch) continue;
      op(pickle_op::appends);
      count = 0;
    }
    if (count != 0) op(pickle_op::appends);
  }

  /// Refers to what an earlier call returned.
  void again(std::uint32_t shared);
  /// The value just written, for `again`. Before a list's elements are written it is not theirs
  /// to refer to.
  std::uint32_t share();

  /// Ends the pickle.
  std::string finish() &&;

 private:
  // Python's own; the memory viewer passes a batch as arguments of one call, which has a limit.
  static constexpr std::size_t k_batch = 1000;

  void op(unsigned char code) { bytes_ += static_cast<char>(code); }
  void little_endian(std::uint64_t value, std::size_t count);

  std::string bytes_;
  std::unordered_map<std::string_view, std::uint32_t> texts_;
  std::uint32_t shared_ = 0;
};

/// `text` with each byte that is not UTF-8 replaced by U+FFFD.
std::string valid_utf8(std::string_view text);
bool is_utf8(std::string_view text);

enum class pickle_kind : std::uint8_t { none, truth, integer, real, text, list, tuple, dict };
const char* to_string(pickle_kind kind) noexcept;

/// One value of a pickle; containers are looked into through their document.
struct pickle_value {
  pickle_kind kind = pickle_kind::none;
  bool negative = false;     ///< integers: `bits` is then in two's complement
  std::uint32_t length = 0;  ///< bytes of a text
  std::uint64_t bits = 0;    ///< the number, offset of the text, or number of the container
  std::size_t at = 0;        ///< the byte where it was read; 0 is the first
};

/// Reads plain data from a pickle of protocol 2 to 5; nothing in it can run code. Throws
/// invalid_argument naming the byte. `bytes` must outlive the document.
class pickle_document {
 public:
  explicit pickle_document(std::string_view bytes);

  const pickle_value& root() const { return root_; }
  std::string_view text(const pickle_value& value) const {
    return bytes_.substr(value.bits, value.length);
  }
  static double real(const pickle_value& value);
  /// The elements of a list or tuple; for a dict keys and values in turn.
  std::span<const pickle_value> items(const pickle_value& container) const {
    return containers_[container.bits];
  }

 private:
  friend class pickle_reader;
  std::string_view bytes_;
  std::vector<std::vector<pickle_value>> containers_;
  pickle_value root_;
};

}  // namespace evmm
