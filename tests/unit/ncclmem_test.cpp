// SPDX-License-Identifier: Apache-2.0
// A program on an NCCL of our own which preloads libevmm_ncclmem.so, on the host driver. Each case
// runs in a child: the variables are read once.
#include "tests/support/fake_nccl.hpp"
#include "tests/support/fake_nccl_parts.hpp"
#include "tests/support/in_child.hpp"

#include <evmm/units.hpp>

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <thread>
#include <vector>

extern "C" {
int ncclMemAlloc(void** at, std::size_t bytes);
int ncclMemFree(void* at);
}

namespace evmm::test {
namespace {

using namespace evmm::units;

/// "D4 H2": the handles behind an allocation in MiB, by tier.
std::string handles_of(void* at, std::size_t bytes) {
  std::string text;
  for (const mapped_handle& each : handles_behind(reinterpret_cast<address>(at), bytes)) {
    if (!text.empty()) text += ' ';
    text += (each.host ? 'H' : 'D') + std::to_string(each.bytes >> 20);
  }
  return text;
}

/// An allocation that goes well, every byte touched.
void* allocate(std::size_t bytes) {
  void* at = nullptr;
  EXPECT_EQ(ncclMemAlloc(&at, bytes), 0);
  std::memset(at, 7, bytes);
  return at;
}

TEST(ncclmem, serves_device_memory_with_one_handle) {
  in_child({}, [] {
    void* const at = allocate(5_MiB);
    EXPECT_EQ(handles_of(at, 5_MiB), "D6") << "rounded up to the granularity";
    EXPECT_EQ(fake_nccl_count().allocations, 0) << "NCCL's own was not asked";
    EXPECT_EQ(ncclMemFree(at), 0);
    EXPECT_EQ(handles_of(at, 5_MiB), "");
  });
}

TEST(ncclmem, beyond_the_limit_it_ends_in_host_memory) {
  in_child({{"EVMM_NCCLMEM_DEVICE_LIMIT", "8M"}, {"EVMM_NCCLMEM_HOST_TAIL", "16M"}}, [] {
    void* const first = allocate(12_MiB);
    EXPECT_EQ(handles_of(first, 12_MiB), "D8 H4");
    void* const second = allocate(4_MiB);
    EXPECT_EQ(handles_of(second, 4_MiB), "H4") << "the device's share is used up";
    void* none = nullptr;
    testing::internal::CaptureStderr();
    EXPECT_EQ(ncclMemAlloc(&none, 12_MiB), 1) << "ncclUnhandledCudaError";
    const std::string said = testing::internal::GetCapturedStderr();
    EXPECT_NE(said.find("help: raise EVMM_NCCLMEM_DEVICE_LIMIT, or EVMM_NCCLMEM_HOST_TAIL"),
              std::string::npos)
        << said;
    EXPECT_EQ(ncclMemFree(first), 0);
    void* const third = allocate(10_MiB);
    EXPECT_EQ(handles_of(third, 10_MiB), "D8 H2") << "what was freed is there again";
    EXPECT_EQ(ncclMemFree(second), 0);
    EXPECT_EQ(ncclMemFree(third), 0);
  });
}

TEST(ncclmem, a_full_device_is_out_of_memory_without_a_tail_and_goes_on_with_one) {
  in_child({{"EVMM_HOST_DEVICE_BYTES", "8M"}}, [] {
    void* none = nullptr;
    testing::internal::CaptureStderr();
    EXPECT_EQ(ncclMemAlloc(&none, 10_MiB), 1);
    const std::string said = testing::internal::GetCapturedStderr();
    EXPECT_NE(said.find("10.0 MiB: DEVICE 0 has 8.0 MiB free"), std::string::npos) << said;
    EXPECT_NE(said.find("EVMM_NCCLMEM_HOST_TAIL"), std::string::npos) << said;
    EXPECT_EQ(ncclMemFree(allocate(8_MiB)), 0);
  });
  in_child({{"EVMM_HOST_DEVICE_BYTES", "8M"}, {"EVMM_NCCLMEM_HOST_TAIL", "1G"}}, [] {
    void* const at = allocate(10_MiB);
    EXPECT_EQ(handles_of(at, 10_MiB), "D8 H2");
    EXPECT_EQ(ncclMemFree(at), 0);
  });
}

TEST(ncclmem, what_is_not_its_own_goes_to_nccls_own) {
  in_child({}, [] {
    int word = 0;
    EXPECT_EQ(ncclMemFree(&word), 4) << "ncclInvalidArgument of the fake";
    void* at = nullptr;
    EXPECT_EQ(ncclMemAlloc(&at, 0), 0);
    EXPECT_EQ(fake_nccl_count().allocations, 1);
    EXPECT_EQ(ncclMemFree(at), 0);
    EXPECT_EQ(fake_nccl_count().allocations, 0);
  });
}

TEST(ncclmem, stays_nccls_own_where_evmm_cannot_serve) {
  in_child({{"EVMM_NCCLMEM_HOST_TAIL", "much"}}, [] {
    testing::internal::CaptureStderr();
    void* at = nullptr;
    EXPECT_EQ(ncclMemAlloc(&at, 4_MiB), 0);
    const std::string said = testing::internal::GetCapturedStderr();
    EXPECT_NE(said.find("stays NCCL's own"), std::string::npos) << said;
    EXPECT_NE(said.find("EVMM_NCCLMEM_HOST_TAIL"), std::string::npos) << said;
    EXPECT_EQ(fake_nccl_count().allocations, 1);
    EXPECT_EQ(ncclMemFree(at), 0);
  });
}

TEST(ncclmem, serves_threads_side_by_side) {
  in_child({{"EVMM_NCCLMEM_DEVICE_LIMIT", "32M"}, {"EVMM_NCCLMEM_HOST_TAIL", "1G"}}, [] {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([] {
        for (int i = 0; i < 20; ++i) {
          void* const at = allocate(6_MiB);
          EXPECT_EQ(ncclMemFree(at), 0);
        }
      });
    }
    threads.clear();
    void* const whole = allocate(32_MiB);
    EXPECT_EQ(handles_of(whole, 32_MiB), "D32") << "nothing is left over";
  });
}

}  // namespace
}  // namespace evmm::test
