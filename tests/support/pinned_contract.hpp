// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/driver_contract.hpp"

#include <evmm/allocator/pinned_host_allocator.hpp>

#include <cstring>

// What a pinned host allocator promises on any driver. What needs exact sizes and failures is in
// tests/unit/pinned_host_allocator_test.cpp.

namespace evmm::test {

class pinned_contract : public driver_contract {
 protected:
  static address at(const void* pointer) { return reinterpret_cast<address>(pointer); }
};

TEST_P(pinned_contract, memory_carries_bytes_to_the_device_and_back) {
  const scoped_stream stream(*on);
  const auto memory = make(device, 2 * granule);
  for (const bool registered : {false, true}) {
    pinned_host_allocator pinned(
        on, device_id{0},
        {.use_host_register = registered, .register_threads = 4, .reserve_segment = 1_MiB});
    for (const std::size_t bytes : {std::size_t{100}, granule + 5, 2 * granule}) {
      void* const there = pinned.allocate(bytes);
      void* const back = pinned.allocate(bytes);
      std::memset(there, 0x4d, bytes);
      std::memset(back, 0, bytes);
      on->copy(memory.base(), at(there), bytes, stream);
      on->copy(at(back), memory.base(), bytes, stream);
      on->synchronize(native_stream{stream});
      EXPECT_EQ(std::memcmp(there, back, bytes), 0) << bytes << ", registered " << registered;
      pinned.free(there);
      pinned.free(back);
    }
    EXPECT_GT(pinned.empty_cache(), 0u);
  }
}

TEST_P(pinned_contract, a_block_waits_for_the_streams_that_use_it) {
  const scoped_stream stream(*on);
  const auto memory = make(device, granule);
  for (const bool background : {false, true}) {
    pinned_host_allocator pinned(on, device_id{0}, {.background_thread = background});
    void* const first = pinned.allocate(granule);
    std::memset(first, 0x11, granule);
    stream_gate gate(*on, stream);
    on->copy(memory.base(), at(first), granule, stream);
    EXPECT_TRUE(pinned.record(first, stream));
    pinned.free(first);
    void* const second = pinned.allocate(granule);
    ASSERT_NE(second, first);
    std::memset(second, 0x22, granule);
    gate.open();
    on->synchronize(native_stream{stream});
    EXPECT_EQ(read(memory.base() + granule - 1, 1).front(), std::byte{0x11});
    while (pinned.statistics().active_requests.current != 1) pinned.poll();
    EXPECT_EQ(pinned.allocate(granule), first);
    pinned.free(first);
    pinned.free(second);
  }
}

TEST_P(pinned_contract, a_huge_request_says_what_stood_in_the_way_and_harms_nothing) {
  pinned_host_allocator pinned(on, device_id{0});
  void* const first = pinned.allocate(granule);
  EXPECT_THROW(static_cast<void>(pinned.allocate(std::size_t{1} << 50)), error);
  std::memset(first, 1, granule);
  pinned.free(first);
  EXPECT_NE(pinned.allocate(granule), nullptr);
}

}  // namespace evmm::test
