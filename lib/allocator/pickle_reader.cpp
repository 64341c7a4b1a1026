// SPDX-License-Identifier: Apache-2.0
#include "lib/allocator/pickle.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <bit>
#include <limits>
#include <utility>

namespace evmm {

namespace {

[[noreturn]] void refuse(std::size_t at, std::string_view what,
                         std::string help = "the file is damaged, or no pickle of a snapshot") {
  throw invalid_argument(fmt::format("pickle, byte {}: {}", at, what), std::move(help));
}

/// Opcodes with which a pickle calls functions or asks for objects from elsewhere.
const char* dangerous_name(unsigned char code) {
  switch (code) {
    case 'c':
      return "GLOBAL";
    case 0x93:
      return "STACK_GLOBAL";
    case 'R':
      return "REDUCE";
    case 'b':
      return "BUILD";
    case 'i':
      return "INST";
    case 'o':
      return "OBJ";
    case 0x81:
      return "NEWOBJ";
    case 0x92:
      return "NEWOBJ_EX";
    case 0x82:
      return "EXT1";
    case 0x83:
      return "EXT2";
    case 0x84:
      return "EXT4";
    case 'P':
      return "PERSID";
    case 'Q':
      return "BINPERSID";
    default:
      return nullptr;
  }
}

}  // namespace

const char* to_string(pickle_kind kind) noexcept {
  switch (kind) {
    case pickle_kind::none:
      return "None";
    case pickle_kind::truth:
      return "a bool";
    case pickle_kind::integer:
      return "an integer";
    case pickle_kind::real:
      return "a float";
    case pickle_kind::text:
      return "a string";
    case pickle_kind::list:
      return "a list";
    case pickle_kind::tuple:
      return "a tuple";
    case pickle_kind::dict:
      return "a dict";
  }
  return "?";
}

double pickle_document::real(const pickle_value& value) {
  return std::bit_cast<double>(value.bits);
}

/// The stack machine that a pickle is a program for.
class pickle_reader {
 public:
  explicit pickle_reader(pickle_document& document) : document_(document) {}

  void read() {
    if (document_.bytes_.empty()) refuse(0, "it is empty");
    if (take_byte() != pickle_op::protocol) {
      refuse(0, "a pickle of protocol 2 or later does not start so");
    }
    check_protocol();
    do op_at_ = next_;
    while (step(take_byte()));
    if (marks_.empty() && stack_.size() == 1) {
      document_.root_ = stack_.back();
      return;
    }
    refuse(op_at_, "it stops before its value is complete");
  }

 private:
  std::string_view bytes() const { return document_.bytes_; }

  // --- bytes ------------------------------------------------------------------------------------

  /// Skips `count` bytes and returns where they start.
  std::size_t take(std::uint64_t count) {
    if (count > bytes().size() - next_) {
      refuse(bytes().size(), fmt::format("it ends within what starts at byte {}", op_at_));
    }
    return std::exchange(next_, next_ + count);
  }

  unsigned char take_byte() { return static_cast<unsigned char>(bytes()[take(1)]); }

  std::uint64_t take_number(std::size_t count) {
    const std::size_t at = take(count);
    std::uint64_t number = 0;
    for (std::size_t i = count; i-- > 0;) {
      number = number << 8 | static_cast<unsigned char>(bytes()[at + i]);
    }
    return number;
  }

  void check_protocol() {
    const unsigned char protocol = take_byte();
    if (protocol < 2 || protocol > 5) {
      refuse(next_ - 1, fmt::format("protocol {}, not 2 to 5", protocol),
             "write it with a protocol from 2 to 5");
    }
  }

  // --- stack ------------------------------------------------------------------------------------

  void push(pickle_kind kind, std::uint64_t bits = 0, std::uint32_t length = 0) {
    stack_.push_back({kind, false, length, bits, op_at_});
  }

  /// Where the current mark's values start, or all.
  std::size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }

  void need(std::size_t count) const {
    if (stack_.size() - floor() < count) refuse(op_at_, "an opcode without its values");
  }

  /// Where the values above the latest mark start; the mark goes.
  std::size_t take_mark() {
    if (marks_.empty()) refuse(op_at_, "an opcode without its mark");
    const std::size_t start = marks_.back();
    marks_.pop_back();
    return start;
  }

  void push_container(pickle_kind kind) {
    document_.containers_.emplace_back();
    push(kind, document_.containers_.size() - 1);
  }

  /// Makes a container of the values from `start` on.
  void collect(pickle_kind kind, std::size_t start) {
    const auto from = stack_.begin() + static_cast<std::ptrdiff_t>(start);
    document_.containers_.emplace_back(from, stack_.end());
    stack_.erase(from, stack_.end());
    push(kind, document_.containers_.size() - 1);
  }

  void collect_top(std::size_t count) {
    need(count);
    collect(pickle_kind::tuple, stack_.size() - count);
  }

  /// Moves the values from `start` on to the end of the container below them.
  void extend(pickle_kind kind, std::size_t start) {
    if (start == floor() || stack_[start - 1].kind != kind) {
      refuse(op_at_, fmt::format("an opcode that needs {}", to_string(kind)));
    }
    check_pairs(kind, start);
    auto& items = document_.containers_[stack_[start - 1].bits];
    const auto from = stack_.begin() + static_cast<std::ptrdiff_t>(start);
    items.insert(items.end(), from, stack_.end());
    stack_.erase(from, stack_.end());
  }

  void check_pairs(pickle_kind kind, std::size_t start) const {
    if (kind == pickle_kind::dict && (stack_.size() - start) % 2 != 0) {
      refuse(op_at_, "a dict with a key and no value");
    }
  }

  // --- values -----------------------------------------------------------------------------------

  void push_text(std::uint64_t length) {
    const std::size_t at = take(length);
    if (length > std::numeric_limits<std::uint32_t>::max()) refuse(op_at_, "a string of 4 GiB");
    push(pickle_kind::text, at, static_cast<std::uint32_t>(length));
  }

  void push_integer(std::uint64_t bits, bool negative) {
    push(pickle_kind::integer, bits);
    stack_.back().negative = negative;
  }

  void push_long(std::uint64_t count) {
    const std::size_t at = take(count);
    const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(bytes()[at + i]); };
    const bool negative = count != 0 && byte(count - 1) >= 0x80;
    std::uint64_t bits = negative ? ~std::uint64_t{0} : 0;
    for (std::size_t i = 0; i < count && i < 8; ++i) {
      bits = (bits & ~(std::uint64_t{0xff} << (8 * i))) | std::uint64_t{byte(i)} << (8 * i);
    }
    // Only a sign may follow.
    for (std::size_t i = 8; i < count; ++i) {
      if (byte(i) != (negative ? 0xff : 0)) refuse(op_at_, "an integer of more than 64 bits");
    }
    if (negative && bits >> 63 == 0) refuse(op_at_, "an integer of more than 64 bits");
    push_integer(bits, negative);
  }

  void push_real() {
    const std::size_t at = take(8);
    std::uint64_t bits = 0;
    for (std::size_t i = 0; i < 8; ++i) {
      bits = bits << 8 | static_cast<unsigned char>(bytes()[at + i]);
    }
    push(pickle_kind::real, bits);
  }

  // --- memo -------------------------------------------------------------------------------------

  void put(std::uint64_t number) {
    need(1);
    // Numbers count up, and each costs a byte or more.
    if (number > bytes().size()) refuse(op_at_, "a memo number beyond all that could be used");
    if (number >= memo_.size()) memo_.resize(number + 1);
    memo_[number] = {true, stack_.back()};
  }

  void get(std::uint64_t number) {
    if (number >= memo_.size() || !memo_[number].set) {
      refuse(op_at_, fmt::format("memo number {} is used before it is set", number));
    }
    stack_.push_back(memo_[number].value);
  }

  // --- opcodes ----------------------------------------------------------------------------------

  /// False at the end.
  bool step(unsigned char code) {
    switch (code) {
      case pickle_op::stop:
        return false;
      case pickle_op::protocol:
        check_protocol();
        break;
      case pickle_op::frame:
        take(8);
        break;
      case pickle_op::mark:
        marks_.push_back(stack_.size());
        break;
      case pickle_op::none:
        push(pickle_kind::none);
        break;
      case pickle_op::new_true:
        push(pickle_kind::truth, 1);
        break;
      case pickle_op::new_false:
        push(pickle_kind::truth, 0);
        break;
      case pickle_op::integer1:
        push_integer(take_number(1), false);
        break;
      case pickle_op::integer2:
        push_integer(take_number(2), false);
        break;
      case pickle_op::integer4:
        push_long(4);
        break;
      case pickle_op::long1:
        push_long(take_number(1));
        break;
      case pickle_op::long4:
        push_long(take_number(4));
        break;
      case pickle_op::real:
        push_real();
        break;
      case pickle_op::text1:
        push_text(take_number(1));
        break;
      case pickle_op::text4:
        push_text(take_number(4));
        break;
      case pickle_op::text8:
        push_text(take_number(8));
        break;
      case pickle_op::put1:
        put(take_number(1));
        break;
      case pickle_op::put4:
        put(take_number(4));
        break;
      case pickle_op::memoize:
        put(memo_.size());
        break;
      case pickle_op::get1:
        get(take_number(1));
        break;
      case pickle_op::get4:
        get(take_number(4));
        break;
      default:
        step_container(code);
    }
    return true;
  }

  void step_container(unsigned char code) {
    switch (code) {
      case pickle_op::empty_list:
        return push_container(pickle_kind::list);
      case pickle_op::empty_dict:
        return push_container(pickle_kind::dict);
      case pickle_op::empty_tuple:
        return push_container(pickle_kind::tuple);
      case pickle_op::append:
        need(2);
        return extend(pickle_kind::list, stack_.size() - 1);
      case pickle_op::set_item:
        need(3);
        return extend(pickle_kind::dict, stack_.size() - 2);
      case pickle_op::appends:
        return extend(pickle_kind::list, take_mark());
      case pickle_op::set_items:
        return extend(pickle_kind::dict, take_mark());
      case pickle_op::list:
        return collect(pickle_kind::list, take_mark());
      case pickle_op::tuple:
        return collect(pickle_kind::tuple, take_mark());
      case pickle_op::tuple1:
        return collect_top(1);
      case pickle_op::tuple2:
        return collect_top(2);
      case pickle_op::tuple3:
        return collect_top(3);
      case pickle_op::dict: {
        const std::size_t start = take_mark();
        check_pairs(pickle_kind::dict, start);
        return collect(pickle_kind::dict, start);
      }
      default:
        break;
    }
    if (const char* name = dangerous_name(code)) {
      refuse(op_at_, fmt::format("the opcode {}, which could run any code", name),
             "a snapshot is plain data; do not open this file with Python either");
    }
    refuse(op_at_, fmt::format("the opcode {:#04x}, which no snapshot has", code));
  }

  struct memo_entry {
    bool set = false;
    pickle_value value;
  };

  pickle_document& document_;
  std::size_t next_ = 0;
  std::size_t op_at_ = 0;
  std::vector<pickle_value> stack_;
  std::vector<std::size_t> marks_;
  std::vector<memo_entry> memo_;
};

pickle_document::pickle_document(std::string_view bytes) : bytes_(bytes) {
  pickle_reader(*this).read();
}

}  // namespace evmm
