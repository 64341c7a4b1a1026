// SPDX-License-Identifier: Apache-2.0
// Ranks exchange rows through buffers of a symmetric heap whose sizes change from step to step. The
// heap grows when it is full, goes on in host memory where the device part ends, and gives back
// what is no longer needed; offsets are the same on every rank without a message. Runs under
// mpirun, on GPUs or, without one, on the host driver.
#include <evmm/comm/symmetric_buffer.hpp>
#include <evmm/comm/symmetric_heap.hpp>
#include <evmm/driver.hpp>
#include <evmm/error.hpp>
#include <evmm/units.hpp>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <vector>

using namespace evmm::units;

namespace {

using row_word = std::uint32_t;

/// What rank `from` sends to rank `to` in a step.
row_word word(int step, int from, int to, std::size_t i) {
  return static_cast<row_word>(step * 1'000'003 + from * 1009 + to * 31) + static_cast<row_word>(i);
}

class exchange {
 public:
  exchange(evmm::symmetric_heap& heap, evmm::driver& on)
      : heap_(heap), on_(on), stream_(on.create_stream(heap.region().device())) {}
  exchange(const exchange&) = delete;
  exchange& operator=(const exchange&) = delete;
  ~exchange() { on_.destroy_stream(stream_); }
  evmm::native_stream stream() const { return stream_; }

  /// Each rank stores `words` words into its slice of every rank's buffer, and checks what arrived
  /// in its own. Returns the number of wrong words.
  std::size_t run(int step, std::size_t words) {
    evmm::bootstrap& ranks = heap_.region().ranks();
    const int me = ranks.rank().value;
    const auto count = static_cast<std::size_t>(ranks.size());
    // The same call on every rank: the same offset on every rank. The largest one may lie partly on
    // the device and partly in host memory.
    const evmm::symmetric_buffer<row_word> rows(heap_, count * words, stream_, {.may_span = true});
    // Before anybody stores into it, every rank's stream must have come here: the block may have
    // been another buffer a moment ago.
    on_.synchronize(stream_);
    ranks.barrier("buffer is free");
    std::vector<row_word> mine(words);
    for (int to = 0; to < ranks.size(); ++to) {
      for (std::size_t i = 0; i < words; ++i) mine[i] = word(step, me, to, i);
      on_.copy(
          reinterpret_cast<evmm::address>(rows.peer({to}) + static_cast<std::size_t>(me) * words),
          reinterpret_cast<evmm::address>(mine.data()), words * sizeof(row_word), stream_);
      on_.synchronize(stream_);
    }
    ranks.barrier("rows are stored");
    std::vector<row_word> arrived(rows.size());
    on_.copy(reinterpret_cast<evmm::address>(arrived.data()),
             reinterpret_cast<evmm::address>(rows.local()), rows.bytes(), stream_);
    on_.synchronize(stream_);
    std::size_t wrong = 0;
    for (int from = 0; from < ranks.size(); ++from) {
      for (std::size_t i = 0; i < words; ++i) {
        wrong += arrived[static_cast<std::size_t>(from) * words + i] != word(step, from, me, i);
      }
    }
    return wrong;
  }

 private:
  evmm::symmetric_heap& heap_;
  evmm::driver& on_;
  evmm::native_stream stream_;
};

int run() {
  const auto driver = evmm::default_driver();
  const auto ranks = evmm::make_mpi_bootstrap();
  const evmm::device_id device{ranks->node_rank() % driver->device_count()};

  // Addresses for the worst case; memory as it is needed, at most 8 MiB of it on the device.
  evmm::symmetric_region region(ranks, driver, {.device = device, .reserve = 1_GiB});
  evmm::symmetric_heap heap(std::move(region), {.growth_step = 2_MiB, .device_limit = 8_MiB});

  // What is read seldom goes to a pool of its own, so that it can move alone.
  const evmm::pool_id cold = heap.create_pool();
  const evmm::symmetric_buffer<row_word> weights(heap, 1_MiB, nullptr, {.pool = cold});

  std::size_t wrong = 0;
  {
    exchange rows(heap, *driver);
    int step = 0;
    for (const std::size_t words : {1_KiB, 128_KiB, 16_KiB, 1_MiB, 4_KiB}) {
      wrong += rows.run(++step, words);
      if (step == 2) heap.migrate(cold, evmm::tier::host);  // makes room on the device
    }
    const evmm::heap_report report = heap.report();
    if (ranks->rank() == evmm::rank_id{0}) std::printf("%s", report.text().c_str());
    const evmm::native_stream used[] = {rows.stream()};
    const std::size_t given_back = heap.trim(0, {.streams = used});
    heap.verify();  // the ranks have made the same calls
    std::size_t wrong_anywhere = 0;
    for (const std::size_t of_rank : ranks->all_gather_value(wrong)) wrong_anywhere += of_rank;
    wrong = wrong_anywhere;
    if (ranks->rank() == evmm::rank_id{0} && wrong == 0) {
      const std::size_t held = report.ranks[0].device_bytes + report.ranks[0].host_bytes;
      std::printf("verified: %d ranks, %d steps, %zu of %zu MiB a rank given back at the end\n",
                  ranks->size(), step, given_back >> 20, held >> 20);
    } else if (wrong != 0) {
      std::printf("FAILED: rank %d of %d: %zu words were wrong on all ranks together\n",
                  ranks->rank().value, ranks->size(), wrong);
    }
    heap.close({.streams = used});
  }
  return wrong == 0 ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const evmm::error& failure) {
    std::printf("FAILED: %s\n", failure.what());
    return 1;
  }
}
