// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/support/log.hpp"

#include <evmm/driver.hpp>

#include <algorithm>
#include <cstddef>

namespace evmm::ep {

/// Page-locked words, zero at first, that kernels write and the CPU reads.
class pinned_words {
 public:
  pinned_words(driver& on, std::size_t bytes) : on_(on), at_(on.allocate_pinned(bytes)) {
    std::fill_n(reinterpret_cast<char*>(at_), bytes, 0);
  }
  pinned_words(const pinned_words&) = delete;
  pinned_words& operator=(const pinned_words&) = delete;
  ~pinned_words() {
    log_failure("freeing an exchange's page-locked words", [&] { on_.free_pinned(at_); });
  }
  template <class T>
  T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(at_ + offset);
  }

 private:
  driver& on_;
  address at_;
};

}  // namespace evmm::ep
