// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace evmm {

using byte_vector = std::vector<std::byte>;

/// Builds a message of trivially copyable values and counted texts. Ranks of one job run the same
/// build on the same kind of machine, so values travel as they lie in memory.
class wire_writer {
 public:
  template <class T>
  wire_writer& put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    return append(std::as_bytes(std::span{&value, 1}));
  }
  wire_writer& put_text(std::string_view text) {
    put(static_cast<std::uint32_t>(text.size()));
    return append(std::as_bytes(std::span{text}));
  }
  wire_writer& append(std::span<const std::byte> bytes) {
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
    return *this;
  }
  byte_vector take() { return std::move(bytes_); }

 private:
  byte_vector bytes_;
};

/// Takes such a message apart. Throws peer_error, naming `sender`, for one that is too short.
class wire_reader {
 public:
  wire_reader(std::span<const std::byte> bytes, std::string sender)
      : left_(bytes), sender_(std::move(sender)) {}

  template <class T>
  T get() {
    static_assert(std::is_trivially_copyable_v<T>);
    T value{};
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    return value;
  }
  std::string get_text() {
    const auto size = get<std::uint32_t>();
    const auto bytes = take(size);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  std::span<const std::byte> get_bytes(std::size_t size) { return take(size); }
  /// Everything not yet read.
  std::span<const std::byte> rest() { return take(left_.size()); }

 private:
  std::span<const std::byte> take(std::size_t size) {
    if (size > left_.size()) {
      throw peer_error(
          fmt::format("{} sent a message that is {} bytes short", sender_, size - left_.size()));
    }
    const auto taken = left_.first(size);
    left_ = left_.subspan(size);
    return taken;
  }

  std::span<const std::byte> left_;
  std::string sender_;
};

/// An error as bytes, so that other ranks can throw the same one.
inline void put_error(wire_writer& out, error_category category, const error_info& info) {
  out.put(category).put(info.native_code).put_text(info.message).put_text(info.help);
}

struct wire_error {
  error_category category = error_category::driver_error;
  error_info info;
};

inline wire_error get_error(wire_reader& in) {
  wire_error read;
  read.category = in.get<error_category>();
  read.info.native_code = in.get<int>();
  read.info.message = in.get_text();
  read.info.help = in.get_text();
  return read;
}

/// What an exception says, with everything that is not an evmm::error as a driver_error.
inline wire_error describe_error(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const error& known) {
    return {known.category(), {known.message(), known.help(), known.native_code(), known.where()}};
  } catch (const std::exception& other) {
    return {error_category::driver_error, {other.what()}};
  } catch (...) {
    return {error_category::driver_error, {"unknown exception"}};
  }
}

}  // namespace evmm
