// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/nccl_library.hpp"
#include "tests/mpi/mpi_main.hpp"

#include <evmm/comm/nccl_communicator.hpp>
#include <evmm/comm/nccl_window.hpp>
#include <evmm/comm/symmetric_region.hpp>
#include <evmm/driver.hpp>
#include <evmm/units.hpp>

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace evmm::test {

using namespace evmm::units;

/// A rank with a GPU of its own, a region on it and a communicator; the test is skipped where there
/// is none.
class nccl_job : public testing::Test {
 protected:
  void SetUp() override {
    std::string why_not;
    if (!cuda_available(&why_not)) GTEST_SKIP() << why_not;
    if (!load_nccl().why_not.empty()) GTEST_SKIP() << load_nccl().why_not;
    if (world()->size() == 1) GTEST_SKIP() << "alone there are no peers: start two ranks or more";
    on = make_cuda_driver();
    if (on->device_count() < static_cast<int>(world()->node_ranks().size())) {
      GTEST_SKIP() << "a GPU for each rank is needed, " << on->device_count() << " are here";
    }
    device = device_id{world()->node_rank()};
    on->set_current_device(device);
    stream = on->create_stream(device);
  }
  void TearDown() override {
    if (stream != nullptr) on->destroy_stream(stream);
  }

  symmetric_region make_region(std::size_t reserve) const {
    return {world(), on, {.device = device, .reserve = reserve, .cache_limit = 0}};
  }
  nccl_communicator make_communicator(bool blocking = false) const {
    return {world(), on, {.device = device, .blocking = blocking}};
  }
  rank_id rank() const { return world()->rank(); }
  int size() const { return world()->size(); }

  template <class T>
  void write(std::byte* to, const std::vector<T>& values) {
    on->copy(reinterpret_cast<address>(to), reinterpret_cast<address>(values.data()),
             values.size() * sizeof(T), stream);
    on->synchronize(stream);
  }
  template <class T>
  std::vector<T> read(const std::byte* from, std::size_t count) {
    std::vector<T> values(count);
    on->copy(reinterpret_cast<address>(values.data()), reinterpret_cast<address>(from),
             count * sizeof(T), stream);
    on->synchronize(stream);
    return values;
  }
  uses own_stream() const { return {.streams = {&stream, 1}}; }

  std::shared_ptr<driver> on;
  device_id device{0};
  native_stream stream = nullptr;
};

}  // namespace evmm::test
