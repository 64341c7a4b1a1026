// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/comm/symmetric_region.hpp>

#include <cstdint>
#include <memory>
#include <vector>

namespace evmm {

/// The collective observers of one region. All ranks add the same ones in the same order.
class collective_observer_list {
 public:
  observer_subscription add(collective_observer observer);
  /// Those that still hold their subscription, in the order in which they were added.
  std::vector<std::shared_ptr<collective_observer>> current();
  /// Which those are: equal on two ranks that have the same ones.
  std::uint64_t signature();
  /// Whether one of them lets go of something in a change.
  bool concerned(const region_change& change);
  /// Tells all that the region is no more, once. What they throw is logged.
  void gone() noexcept;

 private:
  struct entry {
    std::uint64_t number;
    std::weak_ptr<collective_observer> observer;
  };
  std::vector<entry> entries_;
  std::uint64_t added_ = 0;
};

/// One change while collective observers follow it. They are held until it is over, so that every
/// rank asks the same ones at every step.
class followed_change {
 public:
  followed_change(collective_observer_list& observers, const region_change& change);
  bool followed() const noexcept { return !observers_.empty(); }
  /// Asks each whether the change may be. Local; throws what one of them throws.
  void ask() const;
  /// Lets each take down what the change replaces. Local. From here on they are to be brought up.
  void take_down();
  /// The change holds, under this epoch.
  void committed(std::uint64_t epoch) noexcept;
  /// Collective, when it holds or is off. What observers throw is logged.
  void bring_up(const region_part& part) noexcept;

 private:
  std::vector<std::shared_ptr<collective_observer>> observers_;
  region_change change_;
  bool taken_down_ = false;
};

}  // namespace evmm
