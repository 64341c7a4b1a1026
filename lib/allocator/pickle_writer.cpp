// SPDX-License-Identifier: Apache-2.0
#include "lib/allocator/pickle.hpp"

#include <bit>
#include <utility>

namespace evmm {

namespace {

constexpr std::string_view k_replacement = "\xef\xbf\xbd";  // U+FFFD

/// Bytes of the character that `text` starts with; 0 when it is not UTF-8.
std::size_t character_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return 1;
  const std::size_t length = lead < 0xc2   ? 0
                             : lead < 0xe0 ? 2
                             : lead < 0xf0 ? 3
                             : lead < 0xf5 ? 4
                                           : 0;
  if (length == 0 || text.size() < length) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  // Too long for what it says, halves of surrogate pairs, and beyond Unicode.
  const unsigned char second = byte(1);
  if ((lead == 0xe0 && second < 0xa0) || (lead == 0xed && second > 0x9f) ||
      (lead == 0xf0 && second < 0x90) || (lead == 0xf4 && second > 0x8f)) {
    return 0;
  }
  return length;
}

}  // namespace

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const std::size_t length = character_length(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

std::string valid_utf8(std::string_view text) {
  std::string valid;
  while (!text.empty()) {
    const std::size_t length = character_length(text);
    valid += length == 0 ? k_replacement : text.substr(0, length);
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return valid;
}

pickle_writer::pickle_writer() {
  op(pickle_op::protocol);
  op(2);
}

void pickle_writer::little_endian(std::uint64_t value, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    bytes_ += static_cast<char>(static_cast<unsigned char>(value >> (8 * i)));
  }
}

void pickle_writer::integer(std::uint64_t value) {
  if (value < 0x100) {
    op(pickle_op::integer1);
    little_endian(value, 1);
  } else if (value < 0x10000) {
    op(pickle_op::integer2);
    little_endian(value, 2);
  } else if (value < 0x80000000) {
    op(pickle_op::integer4);
    little_endian(value, 4);
  } else {
    // Two's complement in as few bytes as hold the sign as well.
    const auto count = static_cast<std::size_t>(std::bit_width(value)) / 8 + 1;
    op(pickle_op::long1);
    little_endian(count, 1);
    little_endian(value, count < 8 ? count : 8);
    if (count > 8) little_endian(0, 1);
  }
}

void pickle_writer::integer(std::int64_t value) {
  if (value >= 0) {
    integer(static_cast<std::uint64_t>(value));
  } else if (value >= -0x80000000L) {
    op(pickle_op::integer4);
    little_endian(static_cast<std::uint64_t>(value), 4);
  } else {
    op(pickle_op::long1);
    little_endian(8, 1);
    little_endian(static_cast<std::uint64_t>(value), 8);
  }
}

void pickle_writer::real(double value) {
  const auto bits = std::bit_cast<std::uint64_t>(value);
  op(pickle_op::real);
  for (int shift = 56; shift >= 0; shift -= 8) {
    bytes_ += static_cast<char>(static_cast<unsigned char>(bits >> shift));
  }
}

void pickle_writer::text(std::string_view value) {
  const auto [written, fresh] = texts_.try_emplace(value, shared_);
  if (!fresh) return again(written->second);
  const auto write = [this](std::string_view valid) {
    op(pickle_op::text4);
    little_endian(valid.size(), 4);
    bytes_ += valid;
  };
  if (is_utf8(value)) {
    write(value);
  } else {
    write(valid_utf8(value));
  }
  share();
}

void pickle_writer::pair(std::uint64_t first, std::uint64_t second) {
  integer(first);
  integer(second);
  op(pickle_op::tuple2);
}

void pickle_writer::again(std::uint32_t shared) {
  const bool small = shared < 0x100;
  op(small ? pickle_op::get1 : pickle_op::get4);
  little_endian(shared, small ? 1 : 4);
}

std::uint32_t pickle_writer::share() {
  const bool small = shared_ < 0x100;
  op(small ? pickle_op::put1 : pickle_op::put4);
  little_endian(shared_, small ? 1 : 4);
  return shared_++;
}

std::string pickle_writer::finish() && {
  op(pickle_op::stop);
  return std::move(bytes_);
}

}  // namespace evmm
