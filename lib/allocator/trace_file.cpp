// SPDX-License-Identifier: Apache-2.0
#include "lib/allocator/trace_file.hpp"

#include "lib/allocator/options_grammar.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <system_error>
#include <unordered_map>
#include <unordered_set>

namespace evmm {

namespace {

constexpr const char* k_format = "a line is `a,ID,BYTES,STREAM`, `f,ID` or `c,ID`";
constexpr std::size_t k_most_bytes = (std::size_t{1} << 60) - 1;  // what an allocator accepts
constexpr const char* k_too_much = "1 EiB or more is live at one time";
constexpr unsigned k_most_streams = 4096;  // each becomes a real one; more is a typing error

/// Appends events and keeps the book that all readers share. Each step returns why the event
/// cannot be, or null.
class recorder {
 public:
  explicit recorder(const std::string& name) { made_.source = name; }

  bool has_room(std::size_t bytes) const { return bytes <= k_most_bytes - live_bytes_; }
  std::uint32_t allocate(std::size_t bytes, unsigned stream) {
    const std::uint32_t id = made_.allocations++;
    add({.bytes = bytes,
         .id = id,
         .stream = static_cast<std::uint16_t>(stream),
         .what = trace_event::kind::allocate});
    made_.streams = std::max(made_.streams, stream + 1);
    live_bytes_ += bytes;
    made_.peak_bytes = std::max(made_.peak_bytes, live_bytes_);
    states_.push_back({bytes, state::live});
    return id;
  }
  const char* free(std::uint32_t id) {
    if (states_[id].now != state::live) return "was freed before";
    states_[id].now = state::requested;
    live_bytes_ -= states_[id].bytes;
    add({.id = id, .what = trace_event::kind::free});
    return nullptr;
  }
  const char* freed(std::uint32_t id) {
    if (states_[id].now == state::live) return "has completed its free before it was asked for";
    if (states_[id].now == state::completed) return "has completed its free before";
    states_[id].now = state::completed;
    add({.id = id, .what = trace_event::kind::freed});
    return nullptr;
  }
  bool live(std::uint32_t id) const { return states_[id].now == state::live; }
  void skip_free() { ++made_.unknown_frees; }

  allocation_trace finish(const char* help) {
    if (made_.allocations == 0) {
      throw invalid_argument(fmt::format("{}: there is no allocation in it", made_.source), help);
    }
    made_.events.shrink_to_fit();
    return std::move(made_);
  }

 private:
  enum class state : std::uint8_t { live, requested, completed };
  struct allocation {
    std::size_t bytes;
    state now;
  };

  void add(const trace_event& event) { made_.events.push_back(event); }

  allocation_trace made_;
  std::vector<allocation> states_;
  std::size_t live_bytes_ = 0;
};

// --- lines ------------------------------------------------------------------------------------

/// Reads lines one by one; knows where it is, so that a refusal can say so.
class line_reader {
 public:
  explicit line_reader(const std::string& name) : name_(name), to_(name) {}

  void line(std::string_view text) {
    ++line_;
    if (!text.empty() && text.back() == '\r') text.remove_suffix(1);
    if (text.empty() || text.front() == '#') return;
    std::array<std::string_view, 4> fields;
    const std::size_t count = split(text, fields);
    const std::string_view action = fields[0];
    const std::size_t wanted = action == "a" ? 4 : action == "f" || action == "c" ? 2 : 0;
    if (wanted == 0) refuse(fmt::format("{} is none of a, f and c", quote_option(action)));
    if (count != wanted) {
      refuse(fmt::format("{} fields, but `{}` has {}", count, action, wanted));
    }
    const auto id = number(fields[1], "an id", 0, std::numeric_limits<std::uint64_t>::max());
    if (action == "a") {
      allocate(id, fields);
      return;
    }
    const auto known = ids_.find(id);
    if (known == ids_.end()) refuse(fmt::format("{} was not allocated", id));
    const char* why = action == "f" ? to_.free(known->second) : to_.freed(known->second);
    if (why != nullptr) refuse(fmt::format("{} {}", id, why));
  }

  allocation_trace finish() { return to_.finish(k_format); }

 private:
  /// How many fields there are, of which only the first four are stored.
  static std::size_t split(std::string_view text, std::array<std::string_view, 4>& fields) {
    std::size_t count = 0;
    for (;;) {
      const std::size_t comma = std::min(text.find(','), text.size());
      if (count < fields.size()) fields[count] = text.substr(0, comma);
      ++count;
      if (comma == text.size()) return count;
      text.remove_prefix(comma + 1);
    }
  }

  void allocate(std::uint64_t id, const std::array<std::string_view, 4>& fields) {
    const auto bytes = number(fields[2], "a size in bytes", 1, k_most_bytes);
    const auto stream = number(fields[3], "a stream", 0, k_most_streams - 1);
    const auto [known, added] = ids_.try_emplace(id);
    if (!added) refuse(fmt::format("{} is allocated twice", id));
    if (!to_.has_room(bytes)) refuse(k_too_much);
    known->second = to_.allocate(bytes, static_cast<unsigned>(stream));
  }

  std::uint64_t number(std::string_view word, const char* what, std::uint64_t least,
                       std::uint64_t most) const {
    std::uint64_t value = 0;
    const auto [end, failure] = std::from_chars(word.data(), word.data() + word.size(), value);
    if (failure != std::errc{} || end != word.data() + word.size() || value < least ||
        value > most) {
      refuse(fmt::format("{} is not {} from {} to {}", quote_option(word), what, least, most));
    }
    return value;
  }

  [[noreturn]] void refuse(const std::string& why) const {
    throw invalid_argument(fmt::format("{}:{}: {}", name_, line_, why), k_format);
  }

  const std::string& name_;
  std::size_t line_ = 0;
  recorder to_;
  std::unordered_map<std::uint64_t, std::uint32_t> ids_;
};

// --- snapshots --------------------------------------------------------------------------------

constexpr const char* k_history = "record the history before the allocations (record_history)";

/// The device whose history allocates most; empty when none does.
const std::vector<trace_entry>* busiest(const allocator_snapshot& snapshot) {
  const std::vector<trace_entry>* best = nullptr;
  std::ptrdiff_t most = 0;
  for (const auto& entries : snapshot.device_traces) {
    const auto count = std::count_if(entries.begin(), entries.end(), [](const trace_entry& entry) {
      return entry.action == trace_action::alloc;
    });
    if (count > most) {
      most = count;
      best = &entries;
    }
  }
  return best;
}

/// Addresses become ids, native streams become numbers.
class entry_reader {
 public:
  explicit entry_reader(const std::string& name) : name_(name), to_(name) {}

  void entry(const trace_entry& told) {
    switch (told.action) {
      case trace_action::alloc:
        allocate(told);
        break;
      case trace_action::free_requested:
      case trace_action::free_completed:
        free(told);
        break;
      default:
        break;
    }
    ++index_;
  }

  allocation_trace finish() { return to_.finish(k_history); }

 private:
  void allocate(const trace_entry& told) {
    if (told.bytes == 0 || told.bytes > k_most_bytes) {
      refuse(fmt::format("an allocation of {} bytes", told.bytes));
    }
    refuse_overlap(told);
    if (!to_.has_room(told.bytes)) refuse(k_too_much);
    ids_[told.at] = to_.allocate(told.bytes, number_of(told.stream));
    live_[told.at] = told.bytes;
  }

  void refuse_overlap(const trace_entry& told) const {
    const auto next = live_.lower_bound(told.at);
    const auto overlaps = [&](const auto& other) {
      const auto& [at, bytes] = other;
      return at < told.at ? told.at - at < bytes : at - told.at < told.bytes;
    };
    for (const bool before : {false, true}) {
      if (next == (before ? live_.begin() : live_.end())) continue;
      const auto& other = before ? *std::prev(next) : *next;
      if (!overlaps(other)) continue;
      refuse(
          fmt::format("{} bytes at {:#x} are allocated, but {} bytes at {:#x} were not freed "
                      "before",
                      told.bytes, told.at, other.second, other.first));
    }
  }

  void free(const trace_entry& told) {
    const auto known = ids_.find(told.at);
    if (known == ids_.end()) {
      // Of the time before the history; a request and its completion are one free.
      const bool asked_before = unknown_.erase(told.at) != 0;
      if (told.action == trace_action::free_requested) unknown_.insert(told.at);
      if (!asked_before) to_.skip_free();
      return;
    }
    const bool completed = told.action == trace_action::free_completed;
    if (completed && !to_.live(known->second)) {
      to_.freed(known->second);
      ids_.erase(known);
      return;
    }
    if (const char* why = to_.free(known->second)) refuse(fmt::format("{:#x} {}", told.at, why));
    live_.erase(told.at);
    if (completed) {
      to_.freed(known->second);
      ids_.erase(known);
    }
  }

  unsigned number_of(native_stream stream) {
    if (stream == nullptr) return 0;
    const auto next = static_cast<unsigned>(streams_.size() + 1);
    if (next >= k_most_streams && !streams_.contains(stream)) {
      refuse(fmt::format("more than {} streams", k_most_streams));
    }
    return streams_.try_emplace(stream, next).first->second;
  }

  [[noreturn]] void refuse(const std::string& why) const {
    throw invalid_argument(fmt::format("{}: entry {} of the history: {}", name_, index_, why),
                           k_history);
  }

  const std::string& name_;
  std::size_t index_ = 0;
  recorder to_;
  std::unordered_map<address, std::uint32_t> ids_;
  std::map<address, std::size_t> live_;  ///< bytes of each
  std::unordered_set<address> unknown_;  ///< asked for, not completed
  std::map<native_stream, unsigned> streams_;
};

/// The whole file; zlib reads plain files as they are.
std::string read_file(const std::string& path) {
  errno = 0;
  const std::unique_ptr<gzFile_s, int (*)(gzFile)> file(gzopen(path.c_str(), "rb"), gzclose);
  if (!file) {
    const std::string why = std::generic_category().message(errno);
    throw invalid_argument(fmt::format("{}: cannot be opened: {}", path, why), {}, errno);
  }
  std::string text;
  std::array<char, 1 << 16> buffer;
  int got = 0;
  while ((got = gzread(file.get(), buffer.data(), buffer.size())) > 0) {
    text.append(buffer.data(), static_cast<std::size_t>(got));
  }
  int status = Z_OK;
  const char* why = gzerror(file.get(), &status);
  // A file that ends in the middle of the compressed stream is seen only here.
  if (got < 0 || status != Z_OK) {
    throw invalid_argument(fmt::format("{}:{}: cannot be read further: {}", path,
                                       1 + std::count(text.begin(), text.end(), '\n'), why),
                           "is the file complete?", status);
  }
  return text;
}

}  // namespace

allocation_trace parse_trace(std::string_view text, const std::string& name) {
  line_reader reader(name);
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    reader.line(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return reader.finish();
}

allocation_trace parse_trace(const allocator_snapshot& snapshot, const std::string& name) {
  entry_reader reader(name);
  if (const auto* entries = busiest(snapshot)) {
    for (const trace_entry& each : *entries) reader.entry(each);
  }
  return reader.finish();
}

allocation_trace read_trace(const std::string& path) {
  const std::string text = read_file(path);
  // A pickle of protocol 2 and later begins with this opcode, which no line can.
  if (!text.empty() && text.front() == '\x80') {
    const auto snapshot = [&] {
      try {
        return from_pickle(text);
      } catch (const invalid_argument& refused) {
        throw invalid_argument({.message = fmt::format("{}: {}", path, refused.message()),
                                .help = refused.help(),
                                .native_code = refused.native_code(),
                                .where = refused.where()});
      }
    }();
    return parse_trace(snapshot, path);
  }
  return parse_trace(text, path);
}

}  // namespace evmm
