// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/driver.hpp>

#include <cstddef>
#include <span>

namespace evmm::bench {

/// Memory made and mapped by calls of the CUDA driver written by hand, without evmm: what evmm's
/// mappings are measured against. The primary context of device 0 must be current.
class plain_mapping {
 public:
  plain_mapping(memory_location where, std::size_t bytes, std::span<const memory_location> users);
  plain_mapping(const plain_mapping&) = delete;
  plain_mapping& operator=(const plain_mapping&) = delete;
  ~plain_mapping();

  address base() const { return base_; }

 private:
  address base_ = 0;
  std::size_t bytes_ = 0;
};

}  // namespace evmm::bench
