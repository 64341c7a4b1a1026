// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/support/log.hpp"

#include <evmm/comm/symmetric_heap.hpp>
#include <evmm/error.hpp>

namespace evmm::ep {

/// A pool of a heap, given back at the end.
class owned_pool {
 public:
  explicit owned_pool(symmetric_heap& heap) : heap_(heap), id_(heap.create_pool()) {}
  owned_pool(const owned_pool&) = delete;
  owned_pool& operator=(const owned_pool&) = delete;
  ~owned_pool() {
    log_failure("giving back a pool of the heap", [&] {
      try {
        heap_.release_pool(id_);
      } catch (const invalid_argument&) {
        // The heap is closed, and its pools with it.
      }
    });
  }
  pool_id id() const { return id_; }

 private:
  symmetric_heap& heap_;
  pool_id id_;
};

}  // namespace evmm::ep
