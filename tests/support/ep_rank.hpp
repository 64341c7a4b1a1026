// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/ep_tensors.hpp"

#include <evmm/comm/symmetric_channel.hpp>
#include <evmm/units.hpp>

#include <optional>
#include <vector>

namespace evmm::test {

/// The script's options on as many ranks as there are; `experts` are those of each rank.
ep_script script_for(const rank_context& at, ep::exchange_options options);

/// One rank's side of exchanges: its tensors, and what is checked.
class ep_rank final : public ep_tensors {
 public:
  /// `across` is for the channel between nodes, where there are several.
  ep_rank(const rank_context& at, const ep::exchange_options& options,
          const channel_options& across = {});
  ~ep_rank() override;

  ep::exchange& exchange() { return exchange_; }
  ep::plan& plan() { return plan_; }
  /// Where ranks are on several nodes.
  std::optional<symmetric_channel>& across() { return across_; }

  /// bf16 rows to send backward: those of the rank's sums.
  ep::tokens upload_gradients(const ep_script& script, const ep_script& routing);
  /// Experts, weights and places are those of `routing`, rows those of `script`.
  void expect_received(const ep_script& script, const ep::received& got, const ep_script& routing);
  void expect_received(const ep_script& script, const ep::received& got) {
    expect_received(script, got, script);
  }

  /// Writes what the experts make into the combine buffer, and NaN into all else.
  void write_outputs(const ep_script& script);
  /// Combines; the output.
  std::vector<std::uint16_t> combine(const ep_script& script, bool with_bias);
  std::vector<std::uint16_t> bias_of(const ep_script& script, bool wanted) const;
  /// A whole exchange, verified.
  void run(const ep_script& script, bool with_bias);
  /// The way back of an exchange that was run, verified.
  void run_backward(const ep_script& script);

  std::uint16_t* out() const { return out_.local(); }

 private:
  /// Copies of pageable memory are not for streams that wait for messages.
  void settle() override {
    if (across_) across_->synchronize(stream_);
  }
  ep::exchange& make_exchange(const ep::exchange_options& options, const channel_options& across);
  void expect_by_expert(const ep_script& script, const ep::received& got,
                        const std::vector<ep_row>& rows);
  std::size_t combine_elements() const;

  std::optional<symmetric_channel> across_;  ///< where ranks are on several nodes
  std::optional<ep::exchange> made_;
  ep::exchange& exchange_;
  ep::plan plan_;
  ep::received got_;  ///< last
  symmetric_buffer<float> weight_gradients_;
  symmetric_buffer<std::uint16_t> out_, bias_, outputs_;
};

}  // namespace evmm::test
