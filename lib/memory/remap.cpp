// SPDX-License-Identifier: Apache-2.0
#include "lib/memory/remap.hpp"

#include "lib/support/log.hpp"

#include <utility>

namespace evmm {

void remap::replace(slot& place, memory_ptr next) {
  steps_.push_back({&place, place.memory, std::move(next)});
}

void remap::apply() {
  try {
    for (; applied_ < steps_.size(); ++applied_) {
      put(*steps_[applied_].place, steps_[applied_].after);
    }
  } catch (...) {
    // The step that failed may have unmapped the old already.
    ++applied_;
    roll_back();
    throw;
  }
}

void remap::roll_back() noexcept {
  while (applied_ > 0) {
    const step& last = steps_[--applied_];
    insist("putting a segment back", [&] { put(*last.place, last.before); });
  }
}

std::vector<memory_ptr> remap::commit() noexcept {
  applied_ = 0;
  std::vector<memory_ptr> unused;
  for (step& done : std::exchange(steps_, {})) {
    if (done.before) unused.push_back(std::move(done.before));
  }
  return unused;
}

void remap::put(slot& place, const memory_ptr& memory) {
  if (place.memory == memory && place.mapped.has_value() == (memory != nullptr)) return;
  if (place.mapped) place.mapped->unmap();
  place.mapped.reset();
  place.memory = nullptr;
  if (!memory) return;
  place.mapped.emplace(driver_, place.at, *memory, access_(memory->location()));
  place.memory = memory;
}

}  // namespace evmm
