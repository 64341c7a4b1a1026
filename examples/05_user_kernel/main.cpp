// SPDX-License-Identifier: Apache-2.0
// A user's own communication kernel on evmm's memory: a one-sided all-to-all, written with nothing
// but `symmetric_view`, in a project that finds evmm as an installed package. Half of its receive
// buffers lie in host memory at first and move to the device later; the kernel does not notice.
//
//   mpirun -np 4 05_user_kernel [tokens]
#include "all_to_all.hpp"

#include <evmm/comm/bootstrap.hpp>
#include <evmm/comm/symmetric_region.hpp>
#include <evmm/driver.hpp>
#include <evmm/error.hpp>
#include <evmm/units.hpp>

#include <charconv>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

using namespace evmm::units;

namespace {

constexpr int k_rounds = 6;
constexpr int k_moved_before = 4;       // the round before which the host part moves
constexpr std::uint32_t k_words = 128;  // 1 KiB a row
constexpr std::uint32_t k_most_tokens = 1 << 16;

std::uint32_t tokens_of(int argc, char** argv) {
  if (argc < 2) return 512;
  std::uint32_t tokens = 0;
  const char* const end = argv[1] + std::strlen(argv[1]);
  const auto read = std::from_chars(argv[1], end, tokens);
  if (argc > 2 || read.ec != std::errc{} || read.ptr != end || tokens < 1 ||
      tokens > k_most_tokens) {
    throw evmm::invalid_argument("'" + std::string(argv[argc - 1]) + "' is no number of tokens",
                                 "give one number from 1 to " + std::to_string(k_most_tokens));
  }
  return tokens;
}

/// Lays out a rank's part: everything on the device but the second receive buffer. Collective.
all_to_all lay_out(evmm::symmetric_region& region, std::uint32_t tokens) {
  const auto ranks = static_cast<std::size_t>(region.rank_count());
  all_to_all job{.tokens = tokens, .words = k_words, .max_spins = std::uint64_t{1} << 26};
  std::uint64_t end = 0;
  const auto take = [&](std::size_t bytes) {
    const std::uint64_t begin = end;
    end += (bytes + 255) / 256 * 256;
    return begin;
  };
  const std::size_t buffer = ranks * tokens * k_words * sizeof(std::uint64_t);
  job.flags = take(2 * ranks * sizeof(std::uint64_t));
  job.counts = take(sizeof(counters));
  job.seen = take(ranks * tokens * sizeof(std::uint32_t));
  job.x = take(std::size_t{tokens} * k_words * sizeof(std::uint64_t));
  job.rows[0] = take(buffer);
  region.grow(evmm::tier::device, end);
  job.rows[1] = region.size();
  region.grow(evmm::tier::host, buffer);
  return job;
}

evmm::address at(const evmm::symmetric_region& region, std::uint64_t offset) {
  return reinterpret_cast<evmm::address>(region.local() + offset);
}

/// Nothing has come yet, and this rank's rows are there, on all ranks. Collective.
void fill(evmm::symmetric_region& region, const all_to_all& job, evmm::native_stream stream) {
  const int rank = region.rank().value;
  std::vector<std::uint64_t> x(std::size_t{job.tokens} * job.words);
  for (std::uint32_t token = 0; token < job.tokens; ++token) {
    for (std::uint32_t i = 0; i < job.words; ++i) {
      x[std::size_t{token} * job.words + i] = word_of(rank, token, i);
    }
  }
  evmm::driver& on = region.on();
  on.fill(at(region, 0), std::byte{0}, job.x, stream);  // flags, counters, seen
  on.copy(at(region, job.x), reinterpret_cast<evmm::address>(x.data()), x.size() * sizeof(x[0]),
          stream);
  on.synchronize(stream);
  region.ranks().barrier("rows are there");
}

void enqueue(evmm::symmetric_region& region, const all_to_all& job, evmm::native_stream stream) {
  const evmm::symmetric_view view = region.view();  // of this epoch
  evmm::driver& on = region.on();
  on.fill(at(region, job.counts), std::byte{0}, sizeof(counters), stream);
  if (on.info().kind == evmm::driver_kind::host) {
    on.launch(stream, [view, job] { run_on_host(view, job); });
    return;
  }
#if defined(USER_KERNEL_CUDA)
  if (const char* failed = enqueue_kernels(view, job, region.device().value, stream)) {
    throw evmm::driver_error("the kernels could not be started: " + std::string(failed));
  }
#else
  throw evmm::unsupported("this program was built without its CUDA kernel",
                          "configure it where nvcc is found, or set EVMM_DRIVER=host");
#endif
}

/// What is wrong with a round on this rank; empty when nothing is.
std::string judge(const evmm::symmetric_region& region, const all_to_all& job,
                  evmm::native_stream stream) {
  counters counts{};
  region.on().copy(reinterpret_cast<evmm::address>(&counts), at(region, job.counts), sizeof(counts),
                   stream);
  region.on().synchronize(stream);
  unsigned expected = 0;
  for (int source = 0; source < region.rank_count(); ++source) {
    for (std::uint32_t token = 0; token < job.tokens; ++token) {
      expected += destination(job.round, source, token, region.rank_count()) == region.rank().value;
    }
  }
  if (counts.late == 0 && counts.wrong == 0 && counts.received == expected) return {};
  return "rank " + std::to_string(region.rank().value) + ", round " + std::to_string(job.round) +
         ": " + std::to_string(counts.received) + " rows came of " + std::to_string(expected) +
         ", " + std::to_string(counts.wrong) + " of them wrong; " + std::to_string(counts.late) +
         " ranks did not come";
}

int run(int argc, char** argv) {
  const std::uint32_t tokens = tokens_of(argc, argv);
  const auto driver = evmm::default_driver();
  const auto ranks = evmm::make_mpi_bootstrap();
  if (ranks->node_count() != 1) {
    throw evmm::unsupported("the ranks are on " + std::to_string(ranks->node_count()) +
                                " nodes, and stores reach only peers of the same one",
                            "run all ranks on one node");
  }
  const evmm::device_id device{ranks->node_rank() % driver->device_count()};
  evmm::symmetric_region region(ranks, driver, {.device = device, .reserve = 64_GiB});
  all_to_all job = lay_out(region, tokens);
  const evmm::native_stream stream = driver->create_stream(device);
  const evmm::uses in_use{.streams = {&stream, 1}};
  fill(region, job, stream);

  int failed = 0;
  int through_host = 0;
  for (job.round = 1; job.round <= k_rounds; ++job.round) {
    if (job.round == k_moved_before) region.migrate(1, evmm::tier::device, in_use);
    enqueue(region, job, stream);
    through_host += region.view().on_host(region.view().rank, job.row(0, 0));
    const std::string wrong = judge(region, job, stream);
    if (!wrong.empty()) std::printf("FAILED: %s\n", wrong.c_str());
    for (const int of_rank : ranks->all_gather_value(int{!wrong.empty()})) failed += of_rank;
    if (failed != 0) break;
  }
  if (failed == 0 && ranks->rank() == evmm::rank_id{0}) {
    const bool on_host = driver->info().kind == evmm::driver_kind::host;
    std::printf(
        "verified: %d ranks, %d rounds, %llu rows stored by %s, %d rounds into host memory\n",
        ranks->size(), k_rounds,
        static_cast<unsigned long long>(tokens) * k_rounds *
            static_cast<unsigned long long>(ranks->size()),
        on_host ? "a host function" : "a CUDA kernel", through_host);
  }
  region.close(in_use);
  driver->destroy_stream(stream);
  return failed == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const evmm::error& failure) {
    std::printf("FAILED: %s\n", failure.what());
    return 1;
  }
}
