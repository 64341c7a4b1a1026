// SPDX-License-Identifier: Apache-2.0
// A heap larger than the GPU, every byte of it written and read by a peer.
#include "lib/support/environment.hpp"
#include "lib/support/format.hpp"
#include "tests/gpu/pattern_kernels.hpp"
#include "tests/mpi/mpi_main.hpp"

#include <evmm/comm/symmetric_buffer.hpp>
#include <evmm/driver.hpp>
#include <evmm/units.hpp>

#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <string>

namespace evmm::test {
namespace {

using namespace evmm::units;

TEST(large_heap, every_byte_is_written_and_read_by_a_peer) {
  std::string why_not;
  if (!cuda_available(&why_not)) GTEST_SKIP() << why_not;
  const auto factor = environment("EVMM_LARGE_HEAP");
  if (!factor) {
    GTEST_SKIP() << "it takes most of the machine's memory, and a minute: "
                    "EVMM_LARGE_HEAP=1.5 asks for 1.5 times the GPU's";
  }
  const auto on = default_driver();
  const auto ranks = world();
  const device_id device{ranks->node_rank() % on->device_count()};
  const memory_usage gpu = on->usage(memory_location::on(device));
  const std::size_t bytes =
      static_cast<std::size_t>(std::stod(*factor) * static_cast<double>(gpu.total_bytes)) / 2_MiB *
      2_MiB;
  const std::size_t spilled = bytes + 2_GiB - gpu.free_bytes;
  const auto start = std::chrono::steady_clock::now();
  auto tell = [&, last = start](const char* what) mutable {
    const auto now = std::chrono::steady_clock::now();
    if (ranks->rank() == rank_id{0}) {
      std::printf("%-28s %6.2f s\n", what, std::chrono::duration<double>(now - last).count());
    }
    last = now;
  };

  symmetric_heap heap(symmetric_region(ranks, on, {.device = device, .reserve = bytes + 1_GiB}),
                      {.device_limit = gpu.free_bytes - 2_GiB});
  symmetric_buffer<std::uint64_t> all(heap, bytes / 8, nullptr, {.may_span = true});
  tell("allocated");
  const heap_report report = heap.report();
  EXPECT_GE(report.ranks[0].host_bytes, spilled / 2_MiB * 2_MiB);

  const int me = ranks->rank().value;
  const rank_id next{(me + 1) % ranks->size()};
  const auto seed = [](rank_id writer) { return static_cast<std::uint64_t>(writer.value) << 40; };
  write_by_kernel(device, reinterpret_cast<address>(all.peer(next)), bytes, seed({me}));
  ranks->barrier("written");
  tell("written by a peer's kernel");
  EXPECT_EQ(
      wrong_words_by_kernel(device, reinterpret_cast<address>(all.peer(next)), bytes, seed({me})),
      0u);
  ranks->barrier("read");
  tell("read by a peer's kernel");
  const rank_id before{(me + ranks->size() - 1) % ranks->size()};
  EXPECT_EQ(
      wrong_words_by_kernel(device, reinterpret_cast<address>(all.local()), bytes, seed(before)),
      0u);
  tell("read by its owner's kernel");
  if (ranks->rank() == rank_id{0}) {
    std::printf("%s%d ranks, %s a rank, %.2f times the GPU's %s\n", report.text().c_str(),
                ranks->size(), format_bytes(bytes).c_str(),
                static_cast<double>(bytes) / static_cast<double>(gpu.total_bytes),
                format_bytes(gpu.total_bytes).c_str());
  }
  heap.close();
}

}  // namespace
}  // namespace evmm::test
