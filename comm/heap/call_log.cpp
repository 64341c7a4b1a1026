// SPDX-License-Identifier: Apache-2.0
#include "comm/heap/call_log.hpp"

#include "lib/support/format.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
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
      return fmt::format("trim of {} bytes, {} kept", of.second, of.first);
    case heap_call::migrate:
      return fmt::format("migrate {} bytes at offset {} to {}{}", of.second, of.first,
                         tier_name(of.tiers), of.flag ? ", which is refused" : "");
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

std::string call_log::describe(std::uint64_t number) const {
  const bool forgotten = number < count_ - ring_.size() || (kept_ == 0 && number == count_);
  if (forgotten) return "does not remember it";
  if (number >= count_) return fmt::format("has made only {} calls", count_);
  return to_string(ring_[number % kept_].call);
}

void call_log::compare(bootstrap& ranks, std::span<const call_state> gathered) const {
  const auto other = std::find_if(gathered.begin(), gathered.end(),
                                  [&](const call_state& of) { return of != gathered[0]; });
  if (other == gathered.end()) return;
  // The first call whose checksum is not the same everywhere, among those that all remember. What
  // differs stays in every later checksum: halving finds it in few bytes, however many the ranks.
  std::uint64_t start = 0;
  for (const std::uint64_t first :
       ranks.all_gather_value(count_ - ring_.size(), "symmetric_heap: calls kept")) {
    start = std::max(start, first);
  }
  std::uint64_t last = start;
  for (const call_state& of : gathered) last = std::max(last, of.count);
  auto differing = static_cast<std::size_t>(other - gathered.begin());
  std::uint64_t number = start;
  for (std::uint64_t end = last; number < end;) {
    const std::uint64_t middle = number + (end - number) / 2;
    const std::uint64_t mine = middle < count_ ? ring_[middle % kept_].checksum : 0;
    const auto sums = ranks.all_gather_value(mine, "symmetric_heap: calls");
    const auto odd =
        std::find_if(sums.begin(), sums.end(), [&](std::uint64_t sum) { return sum != sums[0]; });
    if (odd == sums.end()) {
      number = middle + 1;
    } else {
      end = middle;
      differing = static_cast<std::size_t>(odd - sums.begin());
    }
  }
  const auto described = [&](std::uint64_t call) {
    const std::string mine = describe(call);
    return ranks.all_gather(std::as_bytes(std::span{mine}), "symmetric_heap: difference");
  };
  auto texts = described(number);
  if (number > start) {
    // All arguments before it are equal; what the call before gave may not be.
    auto before = described(number - 1);
    const auto odd = std::find_if(before.begin(), before.end(),
                                  [&](const auto& said) { return said != before[0]; });
    if (odd != before.end()) differing = static_cast<std::size_t>(odd - before.begin());
    if (odd != before.end() || number == last) {
      texts = std::move(before);
      --number;
    }
  }
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
