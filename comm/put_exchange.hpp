// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/put_plan.hpp"

#include <evmm/comm/node_link.hpp>
#include <evmm/comm/symmetric_region.hpp>

#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>

namespace evmm {

/// What carries put_steps out, between all ranks of a region.
class put_port {
 public:
  put_port() = default;
  put_port(const put_port&) = delete;
  put_port& operator=(const put_port&) = delete;
  /// Local.
  virtual ~put_port() = default;

  /// "NCCL GIN".
  virtual std::string name() const = 0;
  /// Why it cannot put for now; empty while it can. The same on all ranks.
  virtual std::string why_down() const { return {}; }
  /// Enqueues steps, which begin in their order. One that waits longer than `patience` gives up,
  /// and so do all later ones.
  virtual void carry_out(std::span<const put_step> steps, std::chrono::milliseconds patience,
                         native_stream stream) = 0;
  /// The rank that a step gave up on.
  virtual std::optional<rank_id> late() const = 0;
};

/// An exchange by one-sided puts: each block goes straight to its place at the receiver. While the
/// port is down, blocks go the other way. A change of the region waits for what is under way: the
/// port may have to let go of the old memory.
class put_exchange final : public node_exchange {
 public:
  /// Local. `otherwise` is another way over the same region.
  put_exchange(symmetric_region& region, std::unique_ptr<put_port> port,
               std::unique_ptr<node_exchange> otherwise);
  /// Streams must be past their exchanges.
  ~put_exchange() override;

  std::string way() const override;
  void exchange(std::span<const block> out, std::span<const block> in,
                native_stream stream) override;
  void check() override;
  void drain() override;

 private:
  bootstrap& ranks_;
  driver& on_;
  std::unique_ptr<node_exchange> otherwise_;
  std::unique_ptr<put_port> port_;
  put_plan plan_;
  native_event latest_;  ///< exchanges on different streams come one after the other
  observer_subscription follows_;
};

/// Collective: one reason for all, that of the lowest rank which has one, with its name; empty when
/// none has.
std::string agree_on_reason(bootstrap& ranks, const std::string& mine, std::string_view step);

}  // namespace evmm
