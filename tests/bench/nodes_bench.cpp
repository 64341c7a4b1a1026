// SPDX-License-Identifier: Apache-2.0
// What a channel moves between nodes: each rank to the next one and from the one before, by
// messages and by an NCCL link, beside ncclSend and ncclRecv, and MPI through page-locked memory.
// Run under mpirun, on several hosts or on one, which then counts as several (pretend_hosts).
#include "comm/nccl_library.hpp"
#include "lib/memory/device_scope.hpp"
#include "tests/bench/nodes_support.hpp"

#include <evmm/comm/nccl_link.hpp>
#include <evmm/comm/symmetric_channel.hpp>
#include <evmm/units.hpp>

#include <mpi.h>

#include <cstdio>
#include <exception>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace evmm::bench {
namespace {

using namespace evmm::units;

constexpr std::size_t k_most = 256_MiB;

/// What all cases share, left to the end of the process: a region with room for a source and a
/// destination, and a stream.
struct ground {
  explicit ground(const job& of)
      : at(of), region(of.make(2 * k_most)), stream(of.on->create_stream(of.device)) {
    region.grow(tier::device, 2 * k_most);
    at.on->fill(reinterpret_cast<address>(region.local()), std::byte{1}, 2 * k_most, stream);
    at.on->synchronize(stream);
  }
  rank_id next() const { return {(at.ranks->rank().value + 1) % at.ranks->size()}; }
  rank_id previous() const {
    return {(at.ranks->rank().value + at.ranks->size() - 1) % at.ranks->size()};
  }
  std::span<std::byte> source(std::size_t bytes) const { return {region.local(), bytes}; }
  std::span<std::byte> target(std::size_t bytes) const { return {region.local() + k_most, bytes}; }

  job at;
  symmetric_region region;
  native_stream stream;
};
ground& shared(const job& at) {
  static auto* const made = new ground(at);
  return *made;
}

/// Times `step`, which moves `bytes`.
void measure(benchmark::State& state, const job& at, std::size_t bytes,
             const std::function<void()>& step) {
  measure_together(state, at, step);
  count_bytes(state, bytes);
}

using move =
    std::function<void(symmetric_channel&, const ground&, std::size_t bytes, std::uint64_t round)>;

/// Puts, and waits for the signal that the other has put too.
void puts(symmetric_channel& channel, const ground& on, std::size_t bytes, std::uint64_t round) {
  const signal_word word{.offset = 2 * k_most - 8, .value = round};
  channel.put_signal(on.next(), k_most, on.source(bytes), word, on.stream);
  channel.wait_signal(on.previous(), word, on.stream);
}
void gets(symmetric_channel& channel, const ground& on, std::size_t bytes, std::uint64_t) {
  channel.get(on.next(), 0, on.target(bytes), on.stream);
}
void exchanges(symmetric_channel& channel, const ground& on, std::size_t bytes, std::uint64_t) {
  const auto n = static_cast<std::size_t>(on.at.ranks->size());
  std::vector<outgoing_block> out(n);
  std::vector<incoming_block> in(n);
  out[static_cast<std::size_t>(on.next().value)] = {.from = 0, .to = k_most, .bytes = bytes};
  in[static_cast<std::size_t>(on.previous().value)] = {.at = k_most, .bytes = bytes};
  channel.all_to_all_v(out, in, on.stream);
}

void by_channel(benchmark::State& state, const job& at, std::size_t bytes, bool nccl,
                const move& moves) {
  ground& on = shared(at);
  channel_options options;
  if (nccl)
    options.link = make_nccl_link(shared_communicator(at), at.ranks->make_link(), {.large = 1});
  symmetric_channel channel(on.region, options);
  at.on->fill(reinterpret_cast<address>(on.region.local()) + 2 * k_most - 8, std::byte{0}, 8,
              on.stream);
  channel.synchronize(on.stream);
  std::uint64_t round = 0;
  measure(state, at, bytes, [&] {
    moves(channel, on, bytes, ++round);
    channel.synchronize(on.stream);
  });
  channel.close();
}

void by_nccl(benchmark::State& state, const job& at, std::size_t bytes) {
  const ground& on = shared(at);
  nccl_communicator& nccl = shared_communicator(at);
  const nccl_api& api = load_nccl().api;
  const device_scope current(*at.on, at.device);
  measure(state, at, bytes, [&] {
    api.group_start();
    api.receive(on.target(bytes).data(), bytes, nccl_int8, on.previous().value, nccl.get(),
                on.stream);
    api.send(on.source(bytes).data(), bytes, nccl_int8, on.next().value, nccl.get(), on.stream);
    api.group_end();
    nccl.settle("ncclSend and ncclRecv");
    at.on->synchronize(on.stream);
  });
}

/// As a program does it that knows of no memory but the host's.
void by_mpi(benchmark::State& state, const job& at, std::size_t bytes) {
  const ground& on = shared(at);
  const address out = at.on->allocate_pinned(bytes);
  const address in = at.on->allocate_pinned(bytes);
  measure(state, at, bytes, [&] {
    at.on->copy(out, reinterpret_cast<address>(on.source(bytes).data()), bytes, on.stream);
    at.on->synchronize(on.stream);
    MPI_Sendrecv(reinterpret_cast<void*>(out), static_cast<int>(bytes), MPI_BYTE, on.next().value,
                 1, reinterpret_cast<void*>(in), static_cast<int>(bytes), MPI_BYTE,
                 on.previous().value, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    at.on->copy(reinterpret_cast<address>(on.target(bytes).data()), in, bytes, on.stream);
    at.on->synchronize(on.stream);
  });
  at.on->free_pinned(out);
  at.on->free_pinned(in);
}

void add_sizes(const std::string& name,
               const std::function<void(benchmark::State&, std::size_t)>& body) {
  for (const std::size_t bytes : {64_KiB, 1_MiB, 4_MiB, 16_MiB, 64_MiB, k_most}) {
    add_case(name + "/bytes:" + std::to_string(bytes), k_node_rounds,
             [=](benchmark::State& state) { body(state, bytes); });
  }
}

void add_cases(const job& at) {
  const std::pair<const char*, move> moves[] = {
      {"put", puts}, {"get", gets}, {"all_to_all_v", exchanges}};
  for (const auto& [name, each] : moves) {
    for (const bool nccl : {false, true}) {
      if (nccl && at.on->info().kind != driver_kind::cuda) continue;
      add_sizes("nodes/" + std::string(name) + (nccl ? "/nccl" : "/messages"),
                [at, nccl, each = each](auto& state, std::size_t bytes) {
                  by_channel(state, at, bytes, nccl, each);
                });
    }
  }
  if (at.on->info().kind == driver_kind::cuda) {
    add_sizes("nodes/peer_nccl_send_recv",
              [at](auto& state, std::size_t bytes) { by_nccl(state, at, bytes); });
  }
  add_sizes("nodes/peer_mpi_sendrecv_pinned",
            [at](auto& state, std::size_t bytes) { by_mpi(state, at, bytes); });
  add_node_exchanges(at);
}

}  // namespace
}  // namespace evmm::bench

int main(int argc, char** argv) try {
  evmm::bench::pretend_hosts();
  return evmm::bench::run_job(argc, argv, evmm::bench::add_cases);
} catch (const std::exception& failure) {
  std::fprintf(stderr, "%s: %s\n", argv[0], failure.what());
  return 1;
}
