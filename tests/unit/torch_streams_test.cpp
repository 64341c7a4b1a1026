// SPDX-License-Identifier: Apache-2.0
// PyTorch's hooks with streams and captures of a driver that the test holds. The process's
// allocators live as long as it does, and so does the driver.
#include "tests/support/fault_driver.hpp"
#include "tests/support/scoped_capture.hpp"

#include <evmm/host_driver.hpp>
#include <evmm/torch.h>
#include <evmm/units.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>

namespace evmm::test {
namespace {

using namespace evmm::units;

class torch_streams : public testing::Test {
 protected:
  static std::shared_ptr<driver> the_driver() {
    static const auto its = [] {
      auto made = host_driver::make({.devices = 1, .device_bytes = 64_MiB});
      set_default_driver(made);
      return made;
    }();
    return its;
  }

  torch_streams() {
    first_ = on_->create_stream({0});
    second_ = on_->create_stream({0});
  }
  ~torch_streams() override {
    on_->synchronize(first_);
    on_->synchronize(second_);
    evmm_torch_reset();
  }

  static void* allocate(native_stream stream) { return evmm_torch_alloc(3 << 20, 0, stream); }
  static void free(void* at) { evmm_torch_free(at, 3 << 20, 0, nullptr); }

  std::shared_ptr<driver> on_ = the_driver();
  // Not destroyed: the allocator keeps what it learnt of them.
  native_stream first_ = nullptr;
  native_stream second_ = nullptr;
};

TEST_F(torch_streams, a_recorded_stream_delays_reuse) {
  void* const at = allocate(first_);
  stream_gate gate(*on_, second_);
  evmm_torch_record_stream(at, second_);
  free(at);
  void* const other = allocate(first_);
  EXPECT_NE(other, at);
  gate.open();
  on_->synchronize(second_);
  free(other);
  // Both are free now; the allocator polls as it looks for a block.
  void* const one = allocate(first_);
  void* const two = allocate(first_);
  EXPECT_TRUE(one == at || two == at);
  free(one);
  free(two);
}

TEST_F(torch_streams, without_it_memory_is_reused_in_stream_order) {
  const stream_gate gate(*on_, first_);
  void* const at = allocate(first_);
  free(at);
  void* const again = allocate(first_);
  EXPECT_EQ(again, at);
  void* const elsewhere = allocate(second_);
  EXPECT_NE(elsewhere, at);
  free(again);
  free(elsewhere);
}

TEST_F(torch_streams, a_capture_allocates_from_its_pool) {
  const evmm_torch_pool pool{.first = 3, .second = 0};
  void* const outside = allocate(first_);
  std::function<bool(native_stream)> filter = [this](native_stream stream) {
    return on_->capture(stream).status == capture_status::active;
  };
  evmm_torch_begin_allocate_to_pool(0, pool, &filter);
  void* inside = nullptr;
  void* beside = nullptr;
  {
    scoped_capture capture(*on_, first_);
    inside = allocate(first_);
    ASSERT_NE(inside, nullptr) << evmm_torch_last_error();
    on_->fill(reinterpret_cast<address>(inside), std::byte{5}, 3 << 20, first_);
    beside = allocate(second_);  // not captured
    capture.end();
    evmm_torch_end_allocate_to_pool(0, pool);
    // What other work allocates meanwhile is not the graph's.
    free(outside);
    void* const eager = allocate(first_);
    EXPECT_EQ(eager, outside);
    EXPECT_NE(eager, inside);
    capture.launch(first_);
    on_->synchronize(first_);
    EXPECT_EQ(*static_cast<std::byte*>(inside), std::byte{5});
    free(eager);
  }
  // The graph lives on without the tensor: its memory is not handed out before the pool is gone.
  free(inside);
  evmm_torch_reset();
  void* const after = allocate(first_);
  EXPECT_NE(after, inside);
  free(after);
  free(beside);
  evmm_torch_release_pool(0, pool);
  EXPECT_STREQ(evmm_torch_last_error(), "");
}

TEST_F(torch_streams, tiers_begun_in_a_capture_leave_it_the_pool_of_its_graph) {
  const evmm_torch_pool pool{.first = 5, .second = 0};
  std::function<bool(native_stream)> filter = [](native_stream) { return true; };
  evmm_torch_begin_allocate_to_pool(0, pool, &filter);
  {
    scoped_capture capture(*on_, first_);
    EXPECT_EQ(evmm_torch_begin_tiers(0, EVMM_TORCH_HOST_ONLY), EVMM_TORCH_OK);
    void* const inside = allocate(first_);
    on_->fill(reinterpret_cast<address>(inside), std::byte{5}, 3 << 20, first_);
    free(inside);
    capture.end();
    evmm_torch_end_allocate_to_pool(0, pool);
    void* const eager = allocate(first_);
    EXPECT_EQ(evmm_torch_end_tiers(0, EVMM_TORCH_HOST_ONLY), EVMM_TORCH_OK);
    EXPECT_NE(eager, inside) << "the graph writes there whenever it replays";
    on_->fill(reinterpret_cast<address>(eager), std::byte{1}, 3 << 20, first_);
    capture.launch(first_);
    on_->synchronize(first_);
    EXPECT_EQ(*static_cast<std::byte*>(eager), std::byte{1});
    free(eager);
  }
  evmm_torch_release_pool(0, pool);
  EXPECT_STREQ(evmm_torch_last_error(), "");
}

TEST_F(torch_streams, a_stream_recorded_in_a_capture_delays_reuse_to_its_end) {
  const evmm_torch_pool pool{.first = 4, .second = 0};
  std::function<bool(native_stream)> filter = [](native_stream) { return true; };
  evmm_torch_begin_allocate_to_pool(0, pool, &filter);
  void* at = nullptr;
  {
    scoped_capture capture(*on_, first_);
    at = allocate(first_);
    evmm_torch_record_stream(at, second_);
    free(at);
    void* const next = allocate(first_);
    EXPECT_NE(next, at);
    free(next);
    capture.end();
  }
  evmm_torch_end_allocate_to_pool(0, pool);
  EXPECT_STREQ(evmm_torch_last_error(), "");
  evmm_torch_release_pool(0, pool);
  EXPECT_STREQ(evmm_torch_last_error(), "");
}

}  // namespace
}  // namespace evmm::test
