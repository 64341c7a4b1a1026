// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/comm/bootstrap.hpp>
#include <evmm/comm/symmetric_heap.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace evmm {

enum class heap_call : std::uint8_t {
  allocate,
  free,
  record_stream,
  create_pool,
  release_pool,
  grow,
  trim,
  migrate,
  migrate_pool,
  compact,
};

/// One call, with all that must be the same on every rank. Streams are left out: their handles
/// mean nothing elsewhere, and they decide no placement.
struct call_record {
  static constexpr std::uint64_t unfinished = ~std::uint64_t{0};
  heap_call call = heap_call::allocate;
  std::uint8_t tiers = 0;  ///< tier_policy of a request, tier of a change
  bool flag = false;       ///< may_span, use_on_oom; a migration that is refused
  std::uint32_t pool = 0;
  std::uint64_t first = 0;   ///< bytes, or an offset
  std::uint64_t second = 0;  ///< alignment, or bytes
  std::uint64_t result = unfinished;
};
std::string to_string(const call_record& call);

/// How far a rank has come.
struct call_state {
  std::uint64_t count = 0;
  std::uint64_t checksum = 0;
  friend bool operator==(const call_state&, const call_state&) = default;
};

/// A rolling checksum of a heap's calls, and the last of them in a ring, to find the first that
/// differs between ranks.
class call_log {
 public:
  explicit call_log(std::size_t kept) : kept_(kept) {}

  /// A call begins: its arguments count from here on.
  void begin(const call_record& call);
  /// What the last call gave.
  void finish(std::uint64_t result);
  call_state state() const noexcept { return {count_, checksum_}; }

  /// `gathered` has every rank's state. Returns when they are equal; else finds out, with all
  /// ranks, where they part, and throws the same invalid_argument on each.
  void compare(bootstrap& ranks, std::span<const call_state> gathered) const;

 private:
  struct entry {
    call_record call;
    std::uint64_t checksum = 0;  ///< including this call's arguments, not its result
  };
  std::string describe(std::uint64_t number) const;

  std::size_t kept_;
  std::vector<entry> ring_;
  std::uint64_t count_ = 0;
  std::uint64_t checksum_ = 0;
};

}  // namespace evmm
