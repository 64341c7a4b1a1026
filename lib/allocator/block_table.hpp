// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/allocator/block.hpp"

#include <cstddef>
#include <memory>

namespace [[gnu::visibility("default")]] evmm {

/// The blocks of an arena by the address they begin at. Open addressing, a quarter full at most: a
/// probe that is not the last costs more than the memory, since it cannot be foretold.
class block_table {
 public:
  block* find(address at) const noexcept {
    if (count_ == 0) return nullptr;
    for (std::size_t slot = slot_of(at);; slot = (slot + 1) & mask_) {
      const entry& here = slots_[slot];
      if (here.at == at) return here.what;
      if (here.at == 0) return nullptr;
    }
  }
  /// Room for `more` blocks, so that insert() cannot fail.
  void reserve(std::size_t more) {
    if (!has_room(more)) grow((count_ + more) * 4);
  }
  bool has_room(std::size_t more) const noexcept { return (count_ + more) * 4 <= capacity_; }
  void insert(block* added) noexcept;
  void erase(address at) noexcept;

 private:
  struct entry {
    address at = 0;
    block* what = nullptr;
  };
  std::size_t slot_of(address at) const noexcept {
    return static_cast<std::size_t>(((at >> 9) * 0x9e3779b97f4a7c15u) >> shift_);
  }
  void grow(std::size_t least);

  std::unique_ptr<entry[]> slots_;
  std::size_t mask_ = 0;
  std::size_t capacity_ = 0;
  std::size_t count_ = 0;
  int shift_ = 63;
};

}  // namespace evmm
