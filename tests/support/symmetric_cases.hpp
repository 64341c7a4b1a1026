// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/comm/bootstrap.hpp>
#include <evmm/comm/node_link.hpp>
#include <evmm/comm/symmetric_region.hpp>
#include <evmm/driver.hpp>

#include <cstddef>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

// What symmetric_region promises, as cases that every rank runs side by side: threads in
// tests/unit, processes in tests/mpi, with GPUs there when there are any.

namespace evmm::test {

/// One rank of a case.
struct rank_context {
  std::shared_ptr<bootstrap> ranks;
  std::shared_ptr<driver> on;
  device_id device{0};
  /// What channels between nodes go by; empty for the bootstrap's own link.
  std::function<std::shared_ptr<node_link>()> link = {};

  std::size_t granule() const { return on->granularity(memory_location::on(device)); }
  symmetric_region make(symmetric_options options = {}) const;
};

struct symmetric_case {
  std::string name;
  void (*run)(const rank_context&);
  friend void PrintTo(const symmetric_case& each, std::ostream* out) { *out << each.name; }
};
const std::vector<symmetric_case>& symmetric_cases();

/// Every rank writes a pattern of its own over its whole part, and every rank finds every peer's.
void expect_shared(const symmetric_region& region, std::uint64_t seed);
/// Finds them again without writing.
void expect_still_shared(const symmetric_region& region, std::uint64_t seed);
/// Size, epoch and the segments of every rank of the node, as text.
std::string layout(const symmetric_region& region);

}  // namespace evmm::test
