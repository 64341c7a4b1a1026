// SPDX-License-Identifier: Apache-2.0
// NCCL's collectives on memory of regions and heaps, values checked, before and after it changes.
#include "tests/gpu/nccl_job.hpp"
#include "tests/support/scoped_capture.hpp"
#include "tests/support/thread_ranks.hpp"

#include <evmm/comm/symmetric_buffer.hpp>
#include <evmm/comm/symmetric_heap.hpp>

#include <gtest/gtest.h>
#include <nccl.h>

#include <cstdint>
#include <functional>
#include <string>

namespace evmm::test {
namespace {

class nccl_collectives : public nccl_job {
 protected:
  /// Word i of what a rank sends in a round.
  static std::int32_t word(int rank, std::size_t i, int round) {
    return static_cast<std::int32_t>((i % 1009) * static_cast<std::size_t>(rank + 1)) + round;
  }
  std::vector<std::int32_t> words_of(int of_rank, std::size_t first, std::size_t count, int round) {
    std::vector<std::int32_t> words(count);
    for (std::size_t i = 0; i < count; ++i) words[i] = word(of_rank, first + i, round);
    return words;
  }
  void call(nccl_communicator& comm, const char* name, const std::function<ncclResult_t()>& make) {
    const ncclResult_t result = make();
    if (result != ncclSuccess && result != ncclInProgress) {
      throw driver_error(std::string(name) + ": " + ncclGetErrorString(result), {}, result);
    }
    comm.settle(name);
    on->synchronize(stream);
  }

  /// Every collective from the range's first half into its second, `bytes` at `at`.
  void check_collectives(nccl_communicator& comm, std::byte* at, std::size_t bytes, int round) {
    const auto ranks = static_cast<std::size_t>(size());
    const auto me = static_cast<std::size_t>(rank().value);
    const std::size_t count = bytes / 2 / sizeof(std::int32_t) / ranks * ranks;
    const std::size_t share = count / ranks;
    std::byte* const from = at;
    std::byte* const to = at + bytes / 2;
    SCOPED_TRACE("round " + std::to_string(round));

    write(from, words_of(rank().value, 0, count, round));
    call(comm, "ncclAllReduce",
         [&] { return ncclAllReduce(from, to, count, ncclInt32, ncclSum, comm.get(), stream); });
    std::vector<std::int32_t> sum(count);
    for (int r = 0; r < size(); ++r) {
      for (std::size_t i = 0; i < count; ++i) sum[i] += word(r, i, round);
    }
    EXPECT_EQ(read<std::int32_t>(to, count), sum);

    call(comm, "ncclAllGather",
         [&] { return ncclAllGather(from, to, share, ncclInt32, comm.get(), stream); });
    std::vector<std::int32_t> gathered;
    for (int r = 0; r < size(); ++r) {
      const auto of_rank = words_of(r, 0, share, round);
      gathered.insert(gathered.end(), of_rank.begin(), of_rank.end());
    }
    EXPECT_EQ(read<std::int32_t>(to, count), gathered);

    call(comm, "all to all", [&] {
      ncclGroupStart();
      for (std::size_t r = 0; r < ranks; ++r) {
        const std::size_t offset = r * share * sizeof(std::int32_t);
        ncclSend(from + offset, share, ncclInt32, static_cast<int>(r), comm.get(), stream);
        ncclRecv(to + offset, share, ncclInt32, static_cast<int>(r), comm.get(), stream);
      }
      return ncclGroupEnd();
    });
    std::vector<std::int32_t> exchanged;
    for (int r = 0; r < size(); ++r) {
      const auto of_rank = words_of(r, me * share, share, round);
      exchanged.insert(exchanged.end(), of_rank.begin(), of_rank.end());
    }
    EXPECT_EQ(read<std::int32_t>(to, count), exchanged);

    call(comm, "a ring of sends", [&] {
      ncclGroupStart();
      ncclSend(from, share, ncclInt32, (rank().value + 1) % size(), comm.get(), stream);
      ncclRecv(to, share, ncclInt32, (rank().value + size() - 1) % size(), comm.get(), stream);
      return ncclGroupEnd();
    });
    EXPECT_EQ(read<std::int32_t>(to, share),
              words_of((rank().value + size() - 1) % size(), 0, share, round));
  }
};

TEST_F(nccl_collectives, hold_their_values_over_growth_and_migration) {
  auto region = make_region(1_GiB);
  region.grow(tier::device, 32_MiB);
  auto comm = make_communicator();
  const bool host = comm.why_not(nccl_ability::host_segments).empty();
  {
    const nccl_window window(comm, region);
    int round = 0;
    const auto check_all = [&] {
      EXPECT_EQ(window.why_down(), "");
      // A window ends where its segment does, and so may the buffers of a call.
      for (const grown& piece : window.pieces()) {
        check_collectives(comm, region.local() + piece.offset, piece.bytes, ++round);
      }
    };
    check_all();
    const auto kept = read<std::int32_t>(region.local(), 8_MiB / 4);
    region.grow(tier::device, 64_MiB, own_stream());
    EXPECT_EQ(read<std::int32_t>(region.local(), 8_MiB / 4), kept);
    EXPECT_EQ(window.pieces().size(), 2u);
    check_all();
    if (host) {
      region.migrate(1, tier::host, own_stream());
      check_all();
      region.migrate(1, tier::device, own_stream());
      check_all();
      region.grow(tier::host, 32_MiB, own_stream());
      check_all();
      region.shrink(32_MiB, own_stream());
    }
    region.compact(own_stream());
    EXPECT_EQ(window.pieces().size(), 1u);
    check_all();
    region.discard(contents::drop, own_stream());
    EXPECT_NE(window.why_down(), "");
    region.restore();
    check_all();
  }
  comm.close();
  region.close();
}

TEST_F(nccl_collectives, hold_with_symmetric_windows_and_user_buffers) {
  auto region = make_region(1_GiB);
  region.grow(tier::device, 64_MiB);
  auto comm = make_communicator();
  {
    const nccl_window window(comm, region, {}, nccl_window::offsets::symmetric);
    check_collectives(comm, region.local(), 64_MiB, 1);
  }
  {
    const nccl_user_buffer buffer(comm, region);
    check_collectives(comm, region.local(), 64_MiB, 2);
    region.grow(tier::device, 64_MiB, own_stream());
    check_collectives(comm, region.local() + 64_MiB, 64_MiB, 3);
  }
  comm.close();
  region.close();
}

TEST_F(nccl_collectives, hold_on_buffers_of_a_heap) {
  symmetric_heap heap(make_region(1_GiB), {.growth_step = 32_MiB});
  auto comm = make_communicator();
  {
    const symmetric_buffer<std::byte> first(heap, 16_MiB, stream);
    const nccl_window window(comm, heap.region());
    int round = 0;
    const auto check = [&](const symmetric_buffer<std::byte>& buffer) {
      EXPECT_EQ(window.why_down(), "");
      check_collectives(comm, buffer.local(), buffer.bytes(), ++round);
    };
    check(first);
    const auto kept = read<std::int32_t>(first.local(), first.bytes() / 4);
    const symmetric_buffer<std::byte> second(heap, 64_MiB, stream);  // more than there is
    EXPECT_EQ(read<std::int32_t>(first.local(), kept.size()), kept);
    check(first);
    check(second);
    if (comm.why_not(nccl_ability::host_segments).empty()) {
      for (const tier kind : {tier::host, tier::device}) {
        heap.migrate(second.offset(), second.bytes(), kind, own_stream());
        check(first);
        check(second);
      }
    }
    heap.compact(own_stream());
    check(first);
    check(second);
  }
  comm.close();
  heap.close();
}

TEST_F(nccl_collectives, a_captured_graph_pins_the_window) {
  auto region = make_region(1_GiB);
  region.grow(tier::device, 32_MiB);
  auto comm = make_communicator(true);
  {
    const nccl_window window(comm, region);
    constexpr std::size_t count = 4_MiB;
    check_collectives(comm, region.local(), 32_MiB, 1);
    write(region.local(), words_of(rank().value, 0, count / 4, 5));
    scoped_capture graph(*on, stream);
    ASSERT_EQ(ncclAllReduce(region.local(), region.local() + 16_MiB, count / 4, ncclInt32, ncclSum,
                            comm.get(), stream),
              ncclSuccess);
    graph.end();
    {
      const nccl_pin pin = window.pin();
      const auto said = thrown_by([&] { region.migrate(0, tier::host, own_stream()); });
      EXPECT_NE(said.find("pinned"), std::string::npos) << said;
      graph.launch(stream);
      on->synchronize(stream);
      std::vector<std::int32_t> sum(count / 4);
      for (int r = 0; r < size(); ++r) {
        for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += word(r, i, 5);
      }
      EXPECT_EQ(read<std::int32_t>(region.local() + 16_MiB, sum.size()), sum);
    }
    world()->barrier("test: graph is done");
  }
  comm.close();
  region.close();
}

}  // namespace
}  // namespace evmm::test
