// SPDX-License-Identifier: Apache-2.0
#include "comm/heap/call_log.hpp"

#include "lib/support/format.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

namespace evmm {

namespace {

/// The finaliser of SplitMix64: every bit of the input moves half of the bits of the result.
std::uint64_t mixed(std::uint64_t into, std::uint64_t value) {
  std::uint64_t z = (into ^ value) + 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

std::string tier_name(std::uint8_t kind) {
  return to_string(static_cast<tier>(kind));
}

}  // namespace

std::string to_string(const call_record& of) {
  const auto result = [&](const char* what) {
    return of.result == call_record::unfinished ? std::string()
                                                : fmt::format(" -> {} {}", what, of.result);
  };
  switch (of.call) {
    case heap_call::allocate:
      return fmt::format("allocate {} bytes aligned to {}, {}{}, pool {}{}", of.first, of.second,
                         to_string(static_cast<tier_policy>(of.tiers)), of.flag ? ", may span" : "",
                         of.pool, result("offset"));
    case heap_call::free:
      return fmt::format("free offset {}", of.first);
    case heap_call::record_stream:
      return fmt::format("record_stream on offset {}", of.first);
    case heap_call::create_pool:
      return fmt::format("create_pool{}{}", of.flag ? " with use_on_oom" : "", result("pool"));
    case heap_call::release_pool:
      return fmt::format("release_pool {}", of.pool);
    case heap_call::grow:
      return fmt::format("grow pool {} by {} bytes of {}", of.pool, of.first, tier_name(of.tiers));
    case heap_call::trim:
      return fmt::format("trim, {} bytes kept", of.first);
    case heap_call::migrate:
      return fmt::format("migrate {} bytes at offset {} to {}", of.second, of.first,
                         tier_name(of.tiers));
    case heap_call::migrate_pool:
      return fmt::format("migrate pool {} to {}", of.pool, tier_name(of.tiers));
    case heap_call::compact:
      return "compact";
  }
  return "?";
}

void call_log::begin(const call_record& call) {
  const std::uint64_t head =
      static_cast<std::uint64_t>(call.call) | static_cast<std::uint64_t>(call.tiers) << 8 |
      static_cast<std::uint64_t>(call.flag) << 16 | static_cast<std::uint64_t>(call.pool) << 32;
  checksum_ = mixed(mixed(mixed(checksum_, head), call.first), call.second);
  const entry made{call, checksum_};
  if (kept_ > 0) {
    if (ring_.size() < kept_) {
      ring_.push_back(made);
    } else {
      ring_[count_ % kept_] = made;
    }
  }
  ++count_;
}

void call_log::finish(std::uint64_t result) {
  checksum_ = mixed(checksum_, result);
  if (!ring_.empty()) ring_[(count_ - 1) % kept_].call.result = result;
}

std::pair<std::uint64_t, std::vector<std::uint64_t>> call_log::kept() const {
  const std::uint64_t first = count_ - ring_.size();
  std::vector<std::uint64_t> sums;
  for (std::uint64_t i = first; i < count_; ++i) sums.push_back(ring_[i % kept_].checksum);
  return {first, std::move(sums)};
}

std::string call_log::describe(std::uint64_t number) const {
  if (number >= count_) return fmt::format("has made only {} calls", count_);
  if (number < count_ - ring_.size()) return "does not remember it";
  return to_string(ring_[number % kept_].call);
}

void call_log::compare(bootstrap& ranks, std::span<const call_state> gathered) const {
  const auto other = std::find_if(gathered.begin(), gathered.end(),
                                  [&](const call_state& of) { return of != gathered[0]; });
  if (other == gathered.end()) return;
  const auto [first_kept, sums] = kept();
  std::vector<std::uint64_t> message{first_kept};
  message.insert(message.end(), sums.begin(), sums.end());
  const auto all = ranks.all_gather(std::as_bytes(std::span{message}), "symmetric_heap: calls");
  std::vector<std::vector<std::uint64_t>> histories;
  for (const auto& bytes : all) {
    histories.emplace_back(bytes.size() / sizeof(std::uint64_t));
    std::memcpy(histories.back().data(), bytes.data(), bytes.size());
  }
  // The first call whose checksum is not the same everywhere, among those that all remember.
  std::uint64_t start = 0;
  for (const auto& history : histories) start = std::max(start, history[0]);
  const auto sum_of = [&](std::size_t rank, std::uint64_t call) -> std::optional<std::uint64_t> {
    const std::uint64_t at = call - histories[rank][0] + 1;
    if (at >= histories[rank].size()) return std::nullopt;
    return histories[rank][at];
  };
  auto differing = static_cast<std::size_t>(other - gathered.begin());
  std::uint64_t number = start;
  for (;; ++number) {
    const auto expected = sum_of(0, number);
    std::size_t r = 1;
    while (r < histories.size() && sum_of(r, number) == expected) ++r;
    if (r < histories.size()) {
      differing = r;
      break;
    }
    if (!expected) {  // all arguments are equal: then it is what the last call gave
      if (number > start) --number;
      break;
    }
  }
  const std::string mine = describe(number);
  const auto texts = ranks.all_gather(std::as_bytes(std::span{mine}), "symmetric_heap: difference");
  const auto text = [&](std::size_t rank) {
    return std::string(reinterpret_cast<const char*>(texts[rank].data()), texts[rank].size());
  };
  throw invalid_argument(
      fmt::format(
          "the ranks' calls of the symmetric heap differ{} call {}: rank 0: {}; rank {}: {}",
          number == start && start > 0 ? ", at or before" : " from", number + 1, text(0), differing,
          text(differing)),
      "make the same calls in the same order with the same arguments everywhere; "
      "symmetric_heap_options::check = every_call finds the call at once");
}

}  // namespace evmm
