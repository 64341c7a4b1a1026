// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/region.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace [[gnu::visibility("default")]] evmm {

/// The observers of one region.
class observer_list {
 public:
  observer_subscription add(region_observer observer);
  /// Those that still hold their subscription.
  std::vector<std::shared_ptr<region_observer>> current();

 private:
  std::vector<std::weak_ptr<region_observer>> observers_;
};

/// One change while the observers know of it: tells them before in the constructor, which lets a
/// veto through after telling the earlier ones that it is off, and after in the destructor.
class announced_change {
 public:
  /// `rollbacks` counts the change if it is never committed.
  announced_change(observer_list& observers, const region_change& change, std::uint64_t& rollbacks);
  announced_change(const announced_change&) = delete;
  announced_change& operator=(const announced_change&) = delete;
  ~announced_change();
  /// The change holds, under this epoch.
  void committed(std::uint64_t epoch) noexcept;

 private:
  void tell_after(std::size_t count) noexcept;

  std::vector<std::shared_ptr<region_observer>> told_;
  region_change change_;
  std::uint64_t& rollbacks_;
};

}  // namespace evmm
