// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/ep_reference.hpp"
#include "tests/support/symmetric_cases.hpp"

#include <evmm/comm/symmetric_buffer.hpp>
#include <evmm/ep/exchange.hpp>
#include <evmm/units.hpp>

#include <optional>
#include <vector>

namespace evmm::test {

/// The script's options on as many ranks as there are; `experts` are those of each rank.
ep_script script_for(const rank_context& at, ep::exchange_options options);

/// One rank's side of exchanges: its tensors, and what is checked.
class ep_rank {
 public:
  ep_rank(const rank_context& at, const ep::exchange_options& options);
  ~ep_rank();
  ep_rank(const ep_rank&) = delete;
  ep_rank& operator=(const ep_rank&) = delete;

  int me() const { return at_.ranks->rank().value; }
  native_stream stream() const { return stream_; }
  ep::exchange& exchange() { return exchange_; }
  ep::plan& plan() { return plan_; }

  /// The rank's tokens, as they are given.
  ep::tokens upload(const ep_script& script);
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
  template <class T>
  std::vector<T> get(const T* from, std::size_t count) {
    std::vector<T> all(count);
    if (count == 0) return all;
    settle();
    at_.on->copy(reinterpret_cast<address>(all.data()), reinterpret_cast<address>(from),
                 count * sizeof(T), stream_);
    at_.on->synchronize(stream_);
    return all;
  }
  template <class T, class U>
  void put(T* to, const std::vector<U>& all) {
    if (all.empty()) return;
    settle();
    at_.on->copy(reinterpret_cast<address>(to), reinterpret_cast<address>(all.data()),
                 all.size() * sizeof(U), stream_);
    at_.on->synchronize(stream_);
  }

 private:
  /// Copies of pageable memory are not for streams that wait for messages.
  void settle() {
    if (across_) across_->synchronize(stream_);
  }
  ep::exchange& make_exchange(const ep::exchange_options& options);
  void expect_by_expert(const ep_script& script, const ep::received& got,
                        const std::vector<ep_row>& rows);
  std::size_t combine_elements() const;

  const rank_context& at_;
  symmetric_heap heap_;
  std::optional<symmetric_channel> across_;  ///< where ranks are on several nodes
  std::optional<ep::exchange> made_;
  ep::exchange& exchange_;
  ep::plan plan_;
  native_stream stream_;
  ep::received got_;  ///< last
  symmetric_buffer<std::byte> x_;
  symmetric_buffer<float> scales_, weights_, weight_gradients_;
  symmetric_buffer<std::int64_t> ids_;
  symmetric_buffer<std::uint16_t> out_, bias_, outputs_;
};

}  // namespace evmm::test
