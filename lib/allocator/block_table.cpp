// SPDX-License-Identifier: Apache-2.0
#include "lib/allocator/block_table.hpp"

#include <algorithm>
#include <bit>
#include <utility>

namespace evmm {

void block_table::grow(std::size_t least) {
  const std::size_t size = std::bit_ceil(std::max<std::size_t>(least, 64));
  auto old = std::exchange(slots_, std::make_unique<entry[]>(size));
  const std::size_t before = std::exchange(capacity_, size);
  mask_ = size - 1;
  shift_ = 64 - std::countr_zero(size);
  count_ = 0;
  for (std::size_t i = 0; i < before; ++i) {
    if (old[i].at != 0) insert(old[i].what);
  }
}

void block_table::insert(block* added) noexcept {
  std::size_t slot = slot_of(added->at);
  while (slots_[slot].at != 0) slot = (slot + 1) & mask_;
  slots_[slot] = {added->at, added};
  ++count_;
}

void block_table::erase(address at) noexcept {
  std::size_t gap = slot_of(at);
  while (slots_[gap].at != at) gap = (gap + 1) & mask_;
  --count_;
  // Close the gap: move back whatever would no longer be found.
  for (std::size_t next = gap;;) {
    next = (next + 1) & mask_;
    if (slots_[next].at == 0) break;
    const std::size_t home = slot_of(slots_[next].at);
    if (((next - home) & mask_) < ((next - gap) & mask_)) continue;
    slots_[gap] = slots_[next];
    gap = next;
  }
  slots_[gap] = {};
}

}  // namespace evmm
