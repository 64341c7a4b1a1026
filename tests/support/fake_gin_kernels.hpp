// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/gin_kernels.hpp"

#include <evmm/driver.hpp>

#include <atomic>
#include <memory>
#include <vector>

// In a program that links this, host threads take the place of GIN's kernels: they put through the
// windows of the fake NCCL, of which ranks are threads here.

namespace evmm::test {

/// What the kernels that are made from now on work with; one job at a time.
struct fake_gin {
  explicit fake_gin(int ranks)
      : fabrics(static_cast<std::size_t>(ranks),
                gin_fabric{.windows = true, .to_all = true, .on_rails = true}),
        drivers(fabrics.size()),
        signals(fabrics.size() * fabrics.size() * 2),
        of_each(signals.size() / fabrics.size()) {}
  int version = 23007;              ///< compiled with
  std::vector<gin_fabric> fabrics;  ///< by rank
  std::vector<std::shared_ptr<driver>> drivers;
  std::vector<std::atomic<std::uint64_t>> signals;
  std::size_t of_each;  ///< signals of a rank
  std::atomic<int> puts = 0;
};
/// Null: there are no kernels.
void use_fake_gin(std::shared_ptr<fake_gin> next);

}  // namespace evmm::test
