// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/nccl_state.hpp"
#include "comm/window_plan.hpp"

#include <evmm/comm/nccl_window.hpp>
#include <evmm/comm/symmetric_region.hpp>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace evmm {

/// A range of a symmetric region, registered with NCCL, that follows the region. What a window and
/// a user buffer have in common.
class nccl_follower {
 public:
  /// One registration.
  struct piece {
    planned_piece span;
    void* handle;  ///< ncclWindow_t, or what ncclCommRegister gave
  };

  /// Collective: all ranks have it registered, or all throw the same.
  nccl_follower(std::shared_ptr<nccl_communicator::state> on, symmetric_region& region,
                const nccl_range& range, nccl_kind kind);
  nccl_follower(const nccl_follower&) = delete;
  nccl_follower& operator=(const nccl_follower&) = delete;
  /// Local: deregisters.
  ~nccl_follower();

  const nccl_communicator::state& on() const noexcept { return *on_; }
  /// The piece that holds an offset. Throws invalid_argument as nccl_window::at says.
  const piece& at(std::size_t offset) const;
  std::vector<grown> spans() const;
  const std::string& why_down() const noexcept { return why_down_; }
  nccl_pin pin() const;

 private:
  /// Throws invalid_argument where ranks gave different ones. Collective.
  void compare_ranges() const;
  void before_change(const region_change& change) const;
  void take_down(const region_change& change);
  void bring_up(const region_change& change, const region_part& part);
  void check_up() const;

  /// Registers what is not, and lets go of what is not wanted any more. Collective. When it throws,
  /// nothing is registered.
  void register_all(const region_part& part);
  /// By rank. Collective.
  std::vector<std::vector<segment>> gather_segments(const region_part& part) const;
  void register_missing(const std::vector<planned_piece>& planned, const region_part& part);
  void* make(const planned_piece& next, address base);
  void check_room(const std::vector<planned_piece>& planned) const;
  void check_no_capture(std::span<const native_stream> streams) const;
  /// Deregisters the pieces for which `leaving` holds. What it throws has broken the communicator.
  template <class Predicate>
  void retire(Predicate leaving);
  void retire_all() noexcept;
  bool overlaps(const region_change& change) const;
  /// Whether a change takes away a piece, or lets it grow.
  bool takes_down(const region_change& change) const;
  std::string name() const;

  std::shared_ptr<nccl_communicator::state> on_;
  nccl_range range_;
  nccl_kind kind_;
  std::vector<piece> pieces_;  ///< ascending
  std::string why_down_;
  std::shared_ptr<const int> pins_ = std::make_shared<const int>(0);  ///< each hold is a copy
  observer_subscription subscription_;
};

}  // namespace evmm
