// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/memory/memory_source.hpp"

#include <evmm/driver.hpp>
#include <evmm/mapping.hpp>
#include <evmm/region.hpp>

#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

namespace [[gnu::visibility("default")]] evmm {

/// A place for one handle in a reserved range, and what is mapped there.
struct slot {
  address at = 0;
  std::size_t bytes = 0;
  memory_ptr memory = {};              ///< null while nothing backs it
  std::optional<mapping> mapped = {};  ///< engaged exactly while `memory` is mapped here
};

/// Who may touch memory that lies at a location.
using access_rule = std::function<std::vector<access_grant>(memory_location)>;

/// Puts other memory behind slots, all of them or none. A slot keeps its old memory until commit(),
/// so that everything can be put back.
class remap {
 public:
  remap(driver& on, const access_rule& access) : driver_(on), access_(access) {}
  remap(const remap&) = delete;
  remap& operator=(const remap&) = delete;
  /// Rolls back what was not committed.
  ~remap() { roll_back(); }

  /// Plans: `place` is to be backed by `next`, or by nothing when null. The slot stays where it is
  /// until commit or destruction.
  void replace(slot& place, memory_ptr next);
  /// Unmaps the old and maps the new, slot by slot. When a step fails, all is put back, and it
  /// throws. The caller has made sure that no stream uses the old.
  void apply();
  /// Puts back what apply() changed. A slot that cannot be put back is logged and left unbacked.
  void roll_back() noexcept;
  /// Makes it final and returns the memory that is no longer used, in order of replace().
  std::vector<memory_ptr> commit() noexcept;

 private:
  struct step {
    slot* place;
    memory_ptr before, after;
  };
  void put(slot& place, const memory_ptr& memory);

  driver& driver_;
  const access_rule& access_;
  std::vector<step> steps_;
  std::size_t applied_ = 0;
};

}  // namespace evmm
