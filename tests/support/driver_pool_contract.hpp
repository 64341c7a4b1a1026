// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/driver_contract.hpp"

#include <algorithm>
#include <cstring>
#include <new>

#include <sys/mman.h>

// Page-locked host memory, stream-ordered allocation, and who holds memory.

namespace evmm::test {

using driver_pool_contract = driver_contract;

/// Ordinary pages that go with the scope.
class ordinary_pages {
 public:
  explicit ordinary_pages(std::size_t bytes)
      : bytes_(bytes),
        at_(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    if (at_ == MAP_FAILED) throw std::bad_alloc();
  }
  ordinary_pages(const ordinary_pages&) = delete;
  ordinary_pages& operator=(const ordinary_pages&) = delete;
  ~ordinary_pages() { ::munmap(at_, bytes_); }
  address base() const { return reinterpret_cast<address>(at_); }

 private:
  std::size_t bytes_;
  void* at_;
};

// --- page-locked host memory --------------------------------------------------------------------

TEST_P(driver_pool_contract, pinned_memory_is_reached_by_cpu_and_device) {
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{4096}, granule + 17}) {
    const address at = on->allocate_pinned(bytes);
    EXPECT_EQ(at % 4096, 0u);
    auto* const by_cpu = reinterpret_cast<unsigned char*>(at);
    std::memset(by_cpu, 0x31, bytes);
    const auto memory = make(device, 2 * granule);
    const scoped_stream stream(*on);
    on->copy(memory.base() + 8, at, bytes, stream);
    on->fill(at, std::byte{0x77}, bytes, stream);
    on->synchronize(native_stream{stream});
    EXPECT_EQ(by_cpu[0], 0x77);
    EXPECT_EQ(by_cpu[bytes - 1], 0x77);
    on->copy(at, memory.base() + 8, bytes, stream);
    on->synchronize(native_stream{stream});
    EXPECT_TRUE(std::all_of(by_cpu, by_cpu + bytes, [](unsigned char b) { return b == 0x31; }));
    on->free_pinned(at);
  }
}

TEST_P(driver_pool_contract, pinned_memory_is_freed_once_by_its_first_address) {
  EXPECT_THROW(on->allocate_pinned(0), invalid_argument);
  EXPECT_THROW(on->allocate_pinned(std::size_t{1} << 50), error) << "more than there is";
  const address at = on->allocate_pinned(3 * granule);
  EXPECT_THROW(on->free_pinned(at + 4096), invalid_argument);
  EXPECT_THROW(on->unpin(at), invalid_argument) << "it was allocated, not pinned where it lay";
  EXPECT_THROW(on->pin(at, 4096), invalid_argument) << "it is pinned already";
  reinterpret_cast<char*>(at)[3 * granule - 1] = 1;  // a refused call has changed nothing
  on->free_pinned(at);
  EXPECT_THROW(on->free_pinned(at), invalid_argument);
  EXPECT_THROW(on->free_pinned(0), invalid_argument);
}

TEST_P(driver_pool_contract, ordinary_memory_is_pinned_where_it_lies) {
  const ordinary_pages pages(4 * granule);
  write_pattern(*on, pages.base(), 4 * granule, 31);
  on->pin(pages.base() + granule, 2 * granule);
  const scoped_stream stream(*on);
  const auto memory = make(device, 2 * granule);
  on->copy(memory.base(), pages.base() + granule, 2 * granule, stream);
  on->fill(pages.base() + granule, std::byte{0}, 2 * granule, stream);
  on->copy(pages.base() + granule, memory.base(), 2 * granule, stream);
  on->synchronize(native_stream{stream});
  on->unpin(pages.base() + granule);
  EXPECT_TRUE(holds_pattern(*on, pages.base(), 4 * granule, 31)) << "its bytes stay what they were";
}

TEST_P(driver_pool_contract, memory_is_pinned_and_unpinned_once) {
  const ordinary_pages pages(4 * granule);
  const address at = pages.base() + granule;
  EXPECT_THROW(on->pin(0, granule), invalid_argument);
  EXPECT_THROW(on->pin(at, 0), invalid_argument);
  EXPECT_THROW(on->unpin(at), invalid_argument) << "not pinned yet";
  on->pin(at, 2 * granule);
  EXPECT_THROW(on->pin(at, 2 * granule), invalid_argument);
  EXPECT_THROW(on->pin(at - granule, 2 * granule), invalid_argument) << "overlaps";
  EXPECT_THROW(on->pin(at + granule, granule), invalid_argument) << "inside";
  EXPECT_THROW(on->free_pinned(at), invalid_argument) << "it was not allocated";
  EXPECT_THROW(on->unpin(at + granule), invalid_argument);
  on->pin(at - granule, granule);  // beside it
  on->unpin(at - granule);
  on->unpin(at);
  EXPECT_THROW(on->unpin(at), invalid_argument);
  on->pin(at, granule);  // again, another size
  on->unpin(at);
  address gone = 0;
  {
    const ordinary_pages other(granule);
    gone = other.base();
  }
  EXPECT_THROW(on->pin(gone, granule), error) << "no memory of the process";
}

// --- stream-ordered allocation ------------------------------------------------------------------

constexpr device_id k_first_device{0};

TEST_P(driver_pool_contract, stream_ordered_memory_serves_its_stream) {
  const scoped_stream stream(*on);
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{513}, 3 * granule + 5}) {
    const address at = on->allocate_async(k_first_device, bytes, stream);
    EXPECT_EQ(at % 512, 0u);
    on->fill(at, std::byte{0x5a}, bytes, stream);
    std::vector<std::byte> found(bytes);
    on->copy(reinterpret_cast<address>(found.data()), at, bytes, stream);
    on->free_async(at, stream);
    on->synchronize(native_stream{stream});
    EXPECT_EQ(found, std::vector<std::byte>(bytes, std::byte{0x5a}));
  }
}

TEST_P(driver_pool_contract, stream_ordered_memory_is_freed_once) {
  const scoped_stream stream(*on);
  EXPECT_THROW(on->allocate_async(k_first_device, 0, stream), invalid_argument);
  EXPECT_THROW(on->allocate_async(device_id{-1}, 512, stream), invalid_argument);
  EXPECT_THROW(on->async_usage(device_id{on->device_count()}), invalid_argument);
  EXPECT_THROW(on->trim_async(device_id{on->device_count()}, 0), invalid_argument);
  EXPECT_THROW(on->free_async(0, stream), invalid_argument);
  const address at = on->allocate_async(k_first_device, 2 * granule, stream);
  EXPECT_THROW(on->free_async(at + 512, stream), invalid_argument);
  on->free_async(at, stream);
  EXPECT_THROW(on->free_async(at, stream), invalid_argument);
  on->synchronize(native_stream{stream});
  on->trim_async(k_first_device, 0);
}

TEST_P(driver_pool_contract, what_was_freed_is_kept_until_trimmed) {
  constexpr std::size_t bytes = 64_MiB;
  const scoped_stream stream(*on);
  const auto before = on->async_usage(k_first_device);
  on->free_async(on->allocate_async(k_first_device, bytes, stream), stream);
  on->synchronize(native_stream{stream});
  const auto kept = on->async_usage(k_first_device);
  EXPECT_GE(kept.reserved_bytes, bytes);
  EXPECT_EQ(kept.used_bytes, before.used_bytes);
  EXPECT_GE(kept.used_peak, before.used_bytes + bytes);
  EXPECT_GE(kept.reserved_peak, kept.reserved_bytes);
  const auto free_bytes = on->usage(device).free_bytes;
  on->trim_async(k_first_device, 0);
  EXPECT_LT(on->async_usage(k_first_device).reserved_bytes, kept.reserved_bytes);
  EXPECT_GT(on->usage(device).free_bytes, free_bytes) << "the device has it back";
}

TEST_P(driver_pool_contract, a_free_takes_effect_in_stream_order) {
  constexpr std::size_t bytes = 64_MiB;
  const scoped_stream stream(*on);
  const address at = on->allocate_async(k_first_device, bytes, stream);
  on->synchronize(native_stream{stream});
  const auto held = on->async_usage(k_first_device);
  stream_gate gate(*on, stream);
  on->free_async(at, stream);
  on->trim_async(k_first_device, 0);
  EXPECT_GE(on->async_usage(k_first_device).reserved_bytes, bytes) << "the stream may still use it";
  gate.open();
  on->synchronize(native_stream{stream});
  on->trim_async(k_first_device, 0);
  EXPECT_LT(on->async_usage(k_first_device).reserved_bytes, held.reserved_bytes);
}

TEST_P(driver_pool_contract, another_stream_may_free_it_after_an_event) {
  const scoped_stream first(*on);
  const scoped_stream second(*on);
  const scoped_event event(*on);
  const address at = on->allocate_async(k_first_device, granule, first);
  on->fill(at, std::byte{9}, granule, first);
  on->record(event, first);
  on->wait(second, event);
  std::byte found{};
  on->copy(reinterpret_cast<address>(&found), at + granule - 1, 1, second);
  on->free_async(at, second);
  on->synchronize(native_stream{second});
  EXPECT_EQ(found, std::byte{9});
  on->trim_async(k_first_device, 0);
}

TEST_P(driver_pool_contract, a_pool_without_memory_says_what_was_asked) {
  const scoped_stream stream(*on);
  try {
    on->allocate_async(k_first_device, on->usage(device).total_bytes + granule, stream);
    FAIL() << "allocated more than there is";
  } catch (const out_of_memory& failure) {
    EXPECT_NE(failure.message().find("DEVICE 0"), std::string::npos) << failure.what();
    EXPECT_FALSE(failure.help().empty());
  }
  on->free_async(on->allocate_async(k_first_device, granule, stream), stream);
  on->synchronize(native_stream{stream});
  on->trim_async(k_first_device, 0);
}

// --- who holds memory ---------------------------------------------------------------------------

TEST_P(driver_pool_contract, processes_are_told_where_the_machine_tells) {
  const auto memory = make(device, granule);
  int own = 0;
  for (const auto& each : on->processes(k_first_device)) {
    EXPECT_GT(each.pid, 0);
    if (each.this_process) ++own;
  }
  EXPECT_LE(own, 1);
  EXPECT_THROW(on->processes(device_id{on->device_count()}), invalid_argument);
}

}  // namespace evmm::test
