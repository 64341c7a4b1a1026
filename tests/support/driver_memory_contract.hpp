// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/driver_contract.hpp"

#include <algorithm>
#include <cstring>
#include <thread>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

// Devices, addresses, physical memory, mapping, access and sharing.

namespace evmm::test {

using driver_memory_contract = driver_contract;

// --- what is here -------------------------------------------------------------------------------

TEST_P(driver_memory_contract, describes_its_devices_and_refuses_others) {
  ASSERT_GE(on->device_count(), 1);
  EXPECT_FALSE(on->info().name.empty());
  for (int i = 0; i < on->device_count(); ++i) {
    const auto found = on->describe(device_id{i});
    EXPECT_EQ(found.id, device_id{i});
    EXPECT_FALSE(found.name.empty());
    EXPECT_GT(found.total_bytes, 0u);
    EXPECT_TRUE(on->can_access(device_id{i}, device_id{i}));
  }
  for (const int wrong : {-1, on->device_count()}) {
    EXPECT_THROW(on->describe(device_id{wrong}), invalid_argument);
    EXPECT_THROW(on->can_access(device_id{0}, device_id{wrong}), invalid_argument);
    EXPECT_THROW(on->usage({tier::device, wrong}), invalid_argument);
    EXPECT_THROW(on->granularity({tier::device, wrong}), invalid_argument);
    EXPECT_THROW(on->create({.bytes = granule, .where = {tier::device, wrong}}), invalid_argument);
    EXPECT_THROW(on->create_stream(device_id{wrong}), invalid_argument);
    EXPECT_THROW(on->create_event(device_id{wrong}), invalid_argument);
  }
}

TEST_P(driver_memory_contract, each_thread_has_its_device) {
  std::jthread([&] {
    EXPECT_EQ(on->current_device(), std::nullopt);
    on->set_current_device(device_id{0});
    EXPECT_EQ(on->current_device(), device_id{0});
    EXPECT_THROW(on->set_current_device(device_id{on->device_count()}), invalid_argument);
    EXPECT_EQ(on->current_device(), device_id{0});
    on->set_current_device(std::nullopt);
    EXPECT_EQ(on->current_device(), std::nullopt);
  }).join();
}

TEST_P(driver_memory_contract, nodes_ascend_and_others_are_refused) {
  const auto nodes = on->numa_nodes();
  ASSERT_FALSE(nodes.empty());
  EXPECT_TRUE(std::is_sorted(nodes.begin(), nodes.end()));
  for (const int wrong : {-1, nodes.back().value + 500}) {
    const memory_location where{tier::host, wrong};
    EXPECT_THROW(on->create({.bytes = granule, .where = where}), invalid_argument);
    EXPECT_THROW(on->usage(where), invalid_argument);
    EXPECT_THROW(on->granularity(where), invalid_argument);
  }
}

TEST_P(driver_memory_contract, granularity_is_a_power_of_two) {
  for (const auto where : tiers) {
    const auto found = on->granularity(where);
    EXPECT_GT(found, 0u);
    EXPECT_EQ(found & (found - 1), 0u);
  }
}

// --- addresses ----------------------------------------------------------------------------------

TEST_P(driver_memory_contract, reserves_aligned_addresses_without_memory) {
  for (const std::size_t alignment : {std::size_t{0}, std::size_t{4096}, granule, 64_MiB, 1_GiB}) {
    const address_range range(*on, 3 * granule, alignment);
    EXPECT_EQ(range.base() % std::max(alignment, granule), 0u) << alignment;
  }
  const address_range larger_than_any_memory(*on, 512_GiB);
  EXPECT_NE(larger_than_any_memory.base(), 0u);
}

TEST_P(driver_memory_contract, honours_a_hint_that_is_free_and_finds_another_place_otherwise) {
  address base = 0;
  {
    const address_range first(*on, 4 * granule);
    base = first.base();
    const address_range second(*on, 4 * granule, 0, base);
    EXPECT_FALSE(first.contains(second.base()));
    EXPECT_FALSE(second.contains(base));
  }
  const address_range again(*on, 4 * granule, 0, base);
  EXPECT_EQ(again.base(), base);
}

TEST_P(driver_memory_contract, refuses_sizes_and_alignments_that_are_not_whole) {
  EXPECT_THROW(on->reserve(0), invalid_argument);
  EXPECT_THROW(on->reserve(granule + 4096), invalid_argument);
  EXPECT_THROW(on->reserve(granule, 3 * granule), invalid_argument);
  EXPECT_THROW(on->reserve(granule, 0, granule + 4096), invalid_argument);
  EXPECT_THROW(on->reserve(~std::size_t{0} - (granule - 1)), error);
  EXPECT_THROW(on->reserve(std::size_t{1} << 60), error) << "more than there are addresses";
}

TEST_P(driver_memory_contract, frees_a_range_whole_once_and_empty) {
  const address base = on->reserve(4 * granule);
  EXPECT_THROW(on->free(base, 2 * granule), invalid_argument);
  EXPECT_THROW(on->free(base + granule, granule), invalid_argument);
  {
    const physical_memory memory(*on, {.bytes = granule, .where = device});
    const mapping mapped(*on, base + granule, memory, access_for(device));
    EXPECT_THROW(on->free(base, 4 * granule), invalid_argument);
    write_pattern(*on, base + granule, granule, 1);  // a refused free has changed nothing
    EXPECT_TRUE(holds_pattern(*on, base + granule, granule, 1));
  }
  on->free(base, 4 * granule);
  EXPECT_THROW(on->free(base, 4 * granule), invalid_argument);
}

// --- physical memory ----------------------------------------------------------------------------

TEST_P(driver_memory_contract, creates_whole_granules_only) {
  for (const auto where : tiers) {
    EXPECT_THROW(on->create({.bytes = 0, .where = where}), invalid_argument);
    EXPECT_THROW(on->create({.bytes = granule + 4096, .where = where}), invalid_argument);
  }
  EXPECT_THROW(on->create({.bytes = granule, .where = tiers.back(), .rdma = tiers.size() > 1}),
               invalid_argument)
      << "GPUDirect RDMA is for device memory";
}

TEST_P(driver_memory_contract, says_what_was_asked_when_memory_runs_out) {
  const auto before = on->usage(device);
  EXPECT_LE(before.free_bytes, before.total_bytes);
  const std::size_t too_much = (before.total_bytes / granule + 1) * granule;
  try {
    on->create({.bytes = too_much, .where = device});
    FAIL() << "created more than there is";
  } catch (const out_of_memory& failure) {
    EXPECT_NE(failure.message().find("DEVICE 0"), std::string::npos) << failure.what();
    EXPECT_FALSE(failure.help().empty());
  }
}

TEST_P(driver_memory_contract, a_device_gets_its_memory_back_with_the_last_handle_and_mapping) {
  constexpr std::size_t bytes = 64_MiB;
  const address_range range(*on, bytes);
  const auto before = on->usage(device);
  {
    std::optional<physical_memory> memory;
    memory.emplace(*on, allocation_request{.bytes = bytes, .where = device});
    EXPECT_LE(on->usage(device).free_bytes, before.free_bytes - bytes);
    const mapping mapped(*on, range.base(), *memory, access_for(device));
    memory.reset();
    EXPECT_LE(on->usage(device).free_bytes, before.free_bytes - bytes) << "it is still mapped";
  }
  EXPECT_GT(on->usage(device).free_bytes, before.free_bytes - bytes);
}

TEST_P(driver_memory_contract, a_handle_is_released_once) {
  const auto handle = on->create({.bytes = granule, .where = device});
  on->release(handle);
  EXPECT_THROW(on->release(handle), invalid_argument);
  EXPECT_THROW(on->export_fd(handle), invalid_argument);
  const address_range range(*on, granule);
  EXPECT_THROW(on->map(range.base(), granule, handle), invalid_argument);
}

// --- mapping ------------------------------------------------------------------------------------

TEST_P(driver_memory_contract, kernels_reach_what_it_mapped_or_locked) {
  for (const auto where : tiers) {
    const physical_memory memory(*on, {.bytes = 2 * granule, .where = where});
    const address_range range(*on, 2 * granule);
    const mapping mapped(*on, range.base(), memory, access_for(where));
    EXPECT_TRUE(on->kernels_reach(range.base())) << to_string(where);
    EXPECT_TRUE(on->kernels_reach(range.base() + 2 * granule - 1)) << to_string(where);
  }
  const address pinned = on->allocate_pinned(4096);
  EXPECT_TRUE(on->kernels_reach(pinned));
  on->free_pinned(pinned);
  EXPECT_FALSE(on->kernels_reach(0));
  if (on->info().kind == driver_kind::cuda) {
    const std::vector<std::byte> ordinary(4096);
    EXPECT_FALSE(on->kernels_reach(reinterpret_cast<address>(ordinary.data())));
  }
}

TEST_P(driver_memory_contract, memory_keeps_its_bytes_wherever_it_is_mapped) {
  for (const auto where : tiers) {
    const physical_memory memory(*on, {.bytes = 2 * granule, .where = where});
    const address_range range(*on, 8 * granule);
    const auto grants = access_for(where);
    {
      const mapping first(*on, range.base(), memory, grants);
      write_pattern(*on, first.base(), first.size(), 7);
    }
    const mapping elsewhere(*on, range.base() + 3 * granule, memory, grants);
    EXPECT_TRUE(holds_pattern(*on, elsewhere.base(), 2 * granule, 7)) << to_string(where);
    const mapping twice(*on, range.base() + 6 * granule, memory, grants);
    write_pattern(*on, twice.base(), 2 * granule, 8);
    EXPECT_TRUE(holds_pattern(*on, elsewhere.base(), 2 * granule, 8)) << "both see the same bytes";
  }
}

TEST_P(driver_memory_contract, mapped_memory_outlives_its_handle) {
  for (const auto where : tiers) {
    auto memory = make(where, granule);
    write_pattern(*on, memory.base(), granule, 3);
    memory.handles.clear();
    EXPECT_TRUE(holds_pattern(*on, memory.base(), granule, 3)) << to_string(where);
  }
}

TEST_P(driver_memory_contract, maps_whole_handles_where_nothing_is_mapped) {
  const address_range range(*on, 8 * granule);
  const physical_memory memory(*on, {.bytes = 2 * granule, .where = device});
  const address base = range.base();
  const auto handle = memory.handle();
  EXPECT_THROW(on->map(base, granule, handle), invalid_argument) << "a part";
  EXPECT_THROW(on->map(base, 3 * granule, handle), invalid_argument) << "more than it has";
  EXPECT_THROW(on->map(base + 4096, 2 * granule, handle), invalid_argument) << "odd address";
  EXPECT_THROW(on->map(base + 7 * granule, 2 * granule, handle), invalid_argument)
      << "past the end";
  EXPECT_THROW(on->map(0, 2 * granule, handle), invalid_argument);
  EXPECT_THROW(on->map(base, 2 * granule, allocation_handle{0x123456789}), invalid_argument);

  on->map(base + 2 * granule, 2 * granule, handle);
  for (const std::size_t offset : {granule, 2 * granule, 3 * granule}) {
    EXPECT_THROW(on->map(base + offset, 2 * granule, handle), invalid_argument) << offset;
  }
  on->unmap(base + 2 * granule, 2 * granule);

  address freed = 0;
  {
    const address_range other(*on, 2 * granule);
    freed = other.base();
  }
  EXPECT_THROW(on->map(freed, 2 * granule, handle), invalid_argument) << "not reserved any more";
}

TEST_P(driver_memory_contract, unmaps_exactly_one_mapping) {
  auto memory = make(device, 2 * granule, 2);
  const address base = memory.base();
  write_pattern(*on, base, 4 * granule, 5);
  EXPECT_THROW(on->unmap(base, granule), invalid_argument) << "the first half of one";
  EXPECT_THROW(on->unmap(base + granule, granule), invalid_argument) << "the second half";
  EXPECT_THROW(on->unmap(base + granule, 2 * granule), invalid_argument) << "halves of two";
  EXPECT_THROW(on->unmap(base, 4 * granule), invalid_argument) << "two";
  EXPECT_THROW(on->unmap(base + 8 * granule, 2 * granule), invalid_argument) << "none";
  EXPECT_TRUE(holds_pattern(*on, base, 4 * granule, 5));
  memory.mappings.front().unmap();
  EXPECT_THROW(on->unmap(base, 2 * granule), invalid_argument) << "again";
}

// --- access -------------------------------------------------------------------------------------

TEST_P(driver_memory_contract, sets_access_over_several_mappings_at_once) {
  const address_range range(*on, 4 * granule);
  std::vector<mapping> mapped;
  for (std::size_t i = 0; i < 4; ++i) {
    const physical_memory memory(*on, {.bytes = granule, .where = device});
    mapped.emplace_back(*on, range.base() + i * granule, memory, std::vector<access_grant>{});
  }
  const std::array grants{access_grant{device}};
  on->set_access(range.base(), 4 * granule, grants);
  write_pattern(*on, range.base(), 4 * granule, 9);
  EXPECT_TRUE(holds_pattern(*on, range.base(), 4 * granule, 9));
}

TEST_P(driver_memory_contract, sets_access_to_whole_mappings_only) {
  const address_range range(*on, 8 * granule);
  const physical_memory memory(*on, {.bytes = 2 * granule, .where = device});
  const std::array grants{access_grant{device}};
  const address base = range.base();
  const mapping first(*on, base, memory, grants);
  const mapping second(*on, base + 3 * granule, memory, grants);
  const auto refuses = [&](address at, std::size_t bytes) {
    EXPECT_THROW(on->set_access(at, bytes, grants), invalid_argument)
        << (at - base) / granule << ", " << bytes / granule << " granules";
  };
  refuses(base, granule);
  refuses(base + granule, granule);
  refuses(base, 3 * granule);                // ends in a hole
  refuses(base, 5 * granule);                // has a hole
  refuses(base + 2 * granule, 3 * granule);  // begins in a hole
  refuses(base + 5 * granule, granule);      // nothing at all
  refuses(base + 4096, 2 * granule);
  refuses(base, 0);
  const std::array nobody{access_grant{{tier::device, on->device_count()}}};
  EXPECT_THROW(on->set_access(base, 2 * granule, nobody), invalid_argument);
}

TEST_P(driver_memory_contract, cpus_reach_host_memory_and_no_device_memory) {
  const auto on_device = make(device, granule);
  if (tiers.size() < 2) GTEST_SKIP() << "no NUMA node serves create() here";
  const std::array cpus{access_grant{host}};
  EXPECT_THROW(on->set_access(on_device.base(), granule, cpus), invalid_argument);

  const auto memory = make(host, granule);
  auto* const bytes = reinterpret_cast<unsigned char*>(memory.base());
  EXPECT_EQ(std::count(bytes, bytes + granule, 0), static_cast<long>(granule)) << "zeroed";
  bytes[5] = 77;
  EXPECT_EQ(read(memory.base() + 5, 1).front(), std::byte{77});
  on->fill(memory.base(), std::byte{3}, granule, nullptr);
  on->synchronize(native_stream{nullptr});
  EXPECT_EQ(bytes[granule - 1], 3);
}

TEST_P(driver_memory_contract, work_on_unmapped_addresses_is_refused) {
  const address_range range(*on, granule);
  EXPECT_THROW(on->fill(range.base(), std::byte{1}, 64, nullptr), invalid_argument);
  EXPECT_THROW(on->fill(0, std::byte{1}, 64, nullptr), invalid_argument);
  EXPECT_THROW(on->copy(0, range.base(), 64, nullptr), invalid_argument);
  on->fill(0, std::byte{1}, 0, nullptr);  // no bytes, no fault
  on->copy(0, 0, 0, nullptr);
  on->synchronize(native_stream{nullptr});
}

// --- sharing ------------------------------------------------------------------------------------

TEST_P(driver_memory_contract, a_descriptor_stands_for_the_memory) {
  if (!on->info().fd_sharing) GTEST_SKIP() << "the driver shares nothing by descriptor";
  for (const auto where : tiers) {
    const allocation_request request{.bytes = 2 * granule, .where = where};
    std::optional<physical_memory> owner;
    owner.emplace(*on, request);
    const address_range range(*on, 4 * granule);
    std::optional<mapping> mapped;
    mapped.emplace(*on, range.base(), *owner, access_for(where));
    write_pattern(*on, range.base(), 2 * granule, 11);

    unique_fd fd = owner->export_fd();
    const unique_fd another = owner->export_fd();
    EXPECT_NE(fd.get(), another.get());
    EXPECT_NE(::fcntl(fd.get(), F_GETFD) & FD_CLOEXEC, 0) << "children must not hold memory";
    const auto imported = physical_memory::import_fd(*on, fd.get(), request);
    EXPECT_NE(::fcntl(fd.get(), F_GETFD), -1) << "the caller keeps its descriptor";
    fd.reset();
    mapped.reset();
    owner.reset();  // the import alone keeps the memory
    const mapping seen(*on, range.base() + 2 * granule, imported, access_for(where));
    EXPECT_TRUE(holds_pattern(*on, seen.base(), 2 * granule, 11)) << to_string(where);
  }
}

TEST_P(driver_memory_contract, imports_only_its_own_descriptors_and_exports_only_what_was_asked) {
  const physical_memory kept(*on, {.bytes = granule, .where = device, .share = share_kind::none});
  EXPECT_THROW(kept.export_fd(), invalid_argument);
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe(ends.data()), 0);
  const unique_fd reading(ends[0]);
  const unique_fd writing(ends[1]);
  EXPECT_THROW(on->import_fd(reading.get(), {.bytes = granule, .where = device}), error);
  EXPECT_THROW(on->import_fd(-1, {.bytes = granule, .where = device}), invalid_argument);
  EXPECT_NE(::fcntl(reading.get(), F_GETFD), -1);
}

TEST_P(driver_memory_contract, fabric_handles_work_or_are_unsupported) {
  const allocation_request request{.bytes = granule, .where = device, .share = share_kind::fabric};
  if (!on->info().fabric_sharing) {
    const physical_memory memory(*on, {.bytes = granule, .where = device});
    EXPECT_THROW(on->create(request), unsupported);
    EXPECT_THROW(memory.export_fabric(), unsupported);
    EXPECT_THROW(on->import_fabric(fabric_handle{}, request), unsupported);
    return;
  }
  const physical_memory owner(*on, request);
  EXPECT_THROW(owner.export_fd(), invalid_argument) << "it was created for the fabric";
  const auto imported = physical_memory::import_fabric(*on, owner.export_fabric(), request);
  const address_range range(*on, 2 * granule);
  const mapping mine(*on, range.base(), owner, access_for(device));
  const mapping theirs(*on, range.base() + granule, imported, access_for(device));
  write_pattern(*on, mine.base(), granule, 12);
  EXPECT_TRUE(holds_pattern(*on, theirs.base(), granule, 12));
  EXPECT_THROW(on->import_fabric(fabric_handle{}, request), error);
}

// --- threads ------------------------------------------------------------------------------------

TEST_P(driver_memory_contract, threads_do_not_disturb_each_other) {
  constexpr int k_threads = 4;
  std::array<bool, k_threads> right{};
  const auto counted = fault_driver::make(on);
  {
    std::vector<std::thread> threads;
    for (int t = 0; t < k_threads; ++t) {
      threads.emplace_back([&, t] {
        right[static_cast<std::size_t>(t)] = true;
        for (std::uint64_t round = 0; round < 8; ++round) {
          const auto where = tiers[(static_cast<std::size_t>(t) + round) % tiers.size()];
          const address_range range(*counted, 4 * granule);
          const physical_memory memory(*counted, {.bytes = granule, .where = where});
          const mapping mapped(*counted, range.base() + granule, memory, access_for(where));
          const std::uint64_t seed = 100 * static_cast<std::uint64_t>(t) + round;
          write_pattern(*counted, mapped.base(), granule, seed);
          if (!holds_pattern(*counted, mapped.base(), granule, seed)) {
            right[static_cast<std::size_t>(t)] = false;
          }
        }
      });
    }
    for (auto& thread : threads) thread.join();
  }
  EXPECT_TRUE(std::all_of(right.begin(), right.end(), [](bool each) { return each; }));
  auto left = counted->alive();
  left.descriptors = 0;
  EXPECT_EQ(left, alive_counts{});
}

}  // namespace evmm::test
