// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/ep_rank.hpp"

#include <evmm/comm/symmetric_channel.hpp>
#include <evmm/ep/low_latency.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace evmm::test {

/// One rank's side of low-latency exchanges, for scripts whose options they have too.
class low_latency_rank final : public ep_tensors {
 public:
  using round = ep::low_latency_exchange::round;

  /// `across` is for the channel between nodes, where there are several.
  low_latency_rank(const rank_context& at, const ep::exchange_options& options,
                   std::chrono::milliseconds timeout = std::chrono::seconds(30),
                   const channel_options& across = {});
  ~low_latency_rank() override;

  ep::low_latency_exchange& exchange() { return exchange_; }
  /// Where ranks are on several nodes.
  std::optional<symmetric_channel>& across() { return across_; }
  std::uint16_t* out(int which) const { return out_[which].local(); }

  /// Keeps the tokens that were uploaded last, and brings them back in stream order: pageable
  /// memory is not copied while something is under way.
  void save() { move_tokens(true); }
  void restore() { move_tokens(false); }

  /// Rows of ranks whose bit is in `without`, and those that they send on, did not come.
  void expect_received(const ep_script& script, const ep::low_latency_received& got,
                       std::uint64_t without = 0);
  /// Writes what the experts make into the combine buffer, and NaN into all else.
  void write_outputs(const ep_script& script, const round& of, const ep::low_latency_received& got,
                     std::uint64_t without = 0);
  std::vector<std::uint16_t> sums(const ep_script& script, int which) {
    return get(out(which), script.counts[static_cast<std::size_t>(me())] * script.options.hidden);
  }
  /// A whole round, verified.
  void run(const ep_script& script);

 private:
  void settle() override {
    if (across_) across_->synchronize(stream_);
  }
  ep::low_latency_exchange& make_exchange(const ep::exchange_options& options,
                                          std::chrono::milliseconds timeout,
                                          const channel_options& across);
  void move_tokens(bool away);
  /// What a rank sends within its node at most.
  std::size_t batch(const ep_script& script) const;
  /// All places of a receive buffer.
  std::size_t all_places(const ep_script& script) const;
  /// Of a row, in the batch of the rank that sends it on.
  std::size_t token_of(const ep_script& script, const ep_row& row) const;
  /// A received row: its index in rows_received(), and where it lies.
  struct placed {
    std::size_t row, at;
  };
  /// In the order of places.
  std::vector<placed> places(const ep_script& script, std::uint64_t without) const;

  std::optional<symmetric_channel> across_;
  std::optional<ep::low_latency_exchange> made_;
  ep::low_latency_exchange& exchange_;
  symmetric_buffer<std::uint16_t> out_[2];
  symmetric_buffer<std::byte> saved_x_;
  symmetric_buffer<float> saved_scales_, saved_weights_;
  symmetric_buffer<std::int64_t> saved_ids_;
};

}  // namespace evmm::test
