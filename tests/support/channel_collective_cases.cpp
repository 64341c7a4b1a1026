// SPDX-License-Identifier: Apache-2.0
#include "tests/support/channel_bench.hpp"
#include "tests/support/thread_ranks.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <vector>

// The cases of the calls that all ranks make together.

namespace evmm::test {

namespace {

/// Bytes from one rank to another in a round: some none, some few, one pair nearly everything.
std::size_t skewed(std::uint64_t round, int from, int to, int ranks, std::size_t most) {
  std::mt19937 random(static_cast<unsigned>(seed_of(round, from, to)));
  if (from == static_cast<int>(round) % ranks && to == static_cast<int>(round + 1) % ranks)
    return most;
  switch (random() % 3) {
    case 0:
      return 0;
    case 1:
      return random() % 64;
    default:
      return random() % (most / 4);
  }
}

void all_to_all_v_moves_skewed_blocks(const rank_context& at) {
  for (const bool checked : {false, true}) {
    run_skewed_all_to_all(at, {.chunk_bytes = k_chunk, .chunks = 2, .check_counts = checked});
  }
}

void no_block_is_written_before_its_receiver_is_there(const rank_context& at) {
  channel_bench b(at);
  std::vector<outgoing_block> out(static_cast<std::size_t>(b.ranks()), {0, 0, 0});
  std::vector<incoming_block> in(out.size());
  const int last = b.ranks() - 1;
  if (b.me() == 0) out.back() = {.from = 0, .to = 4096, .bytes = 4096};
  if (b.me() == last) in.front() = {.at = 4096, .bytes = 4096};
  if (b.ranks() == 1) in.front() = {.at = 4096, .bytes = 4096};
  b.write(0, 4096, seed_of(1, b.me(), 0));
  const auto read = [&] {
    std::vector<std::byte> found(4096);
    at.on->copy(reinterpret_cast<address>(found.data()), b.own(4096), found.size(), b.stream);
    b.channel.synchronize(b.stream);
    return found;
  };
  const auto before = read();
  at.ranks->barrier("test: all have read");
  const bool receives = b.me() == last && last != 0;
  if (!receives) b.channel.all_to_all_v(out, in, b.stream);
  // The others are under way, and may not have touched this.
  if (receives) {
    EXPECT_EQ(read(), before);
    b.channel.all_to_all_v(out, in, b.stream);
  }
  b.channel.synchronize(b.stream);
  if (b.me() == last) {
    EXPECT_TRUE(b.holds(4096, 4096, seed_of(1, 0, 0)));
  }
  b.finish();
}

void a_barrier_orders_the_streams_of_all_ranks(const rank_context& at) {
  channel_bench b(at);
  const auto n = static_cast<std::size_t>(b.ranks());
  b.clear_words(0, n);
  std::mt19937 delays(static_cast<unsigned>(b.me()));
  for (std::uint64_t round = 1; round <= 10; ++round) {
    dawdle(b, delays);
    for (int r = 0; r < b.ranks(); ++r) {
      b.channel.signal({r}, {8 * static_cast<std::size_t>(b.me()), round}, b.stream);
    }
    b.channel.barrier(b.stream);
    std::vector<std::uint64_t> words(n);
    at.on->copy(reinterpret_cast<address>(words.data()), b.own(0), 8 * n, b.stream);
    b.channel.barrier(b.stream);
    b.channel.synchronize(b.stream);
    EXPECT_EQ(words, std::vector<std::uint64_t>(n, round));
  }
  b.finish();
}

/// Each rank sends the next one a block in every call, and is late on one stream or the other.
void calls_on_several_streams_come_as_they_are_made(const rank_context& at) {
  constexpr std::uint64_t rounds = 20;
  constexpr std::size_t bytes = 4096;
  channel_bench b(at);
  const native_stream streams[] = {b.stream, at.on->create_stream(at.device)};
  const auto next = static_cast<std::size_t>((b.me() + 1) % b.ranks());
  const int previous = (b.me() + b.ranks() - 1) % b.ranks();
  // Of each round: what is sent, where it comes, and what is there after the call behind it.
  const auto source = [](std::uint64_t round) { return 3 * round * bytes; };
  const auto target = [&](std::uint64_t round) { return source(round) + bytes; };
  const auto seen = [&](std::uint64_t round) { return source(round) + 2 * bytes; };
  for (std::uint64_t round = 0; round < rounds; ++round) {
    b.write(source(round), bytes, seed_of(round, b.me(), 0));
  }
  std::mt19937 random(static_cast<unsigned>(b.me()));
  for (std::uint64_t round = 0; round < rounds; ++round) {
    const native_stream stream = streams[round % 2];
    at.on->launch(stream, [us = random() % 2000] {
      const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(us);
      while (std::chrono::steady_clock::now() < end) std::this_thread::yield();
    });
    at.on->fill(b.own(target(round)), std::byte{0xee}, bytes, stream);
    std::vector<outgoing_block> out(static_cast<std::size_t>(b.ranks()));
    std::vector<incoming_block> in(out.size());
    out[next] = {.from = source(round), .to = target(round), .bytes = bytes};
    in[static_cast<std::size_t>(previous)] = {.at = target(round), .bytes = bytes};
    b.channel.all_to_all_v(out, in, stream);
    if (round > 0) at.on->copy(b.own(seen(round - 1)), b.own(target(round - 1)), bytes, stream);
  }
  for (const native_stream stream : streams) b.channel.synchronize(stream);
  for (std::uint64_t round = 0; round < rounds; ++round) {
    const std::uint64_t seed = seed_of(round, previous, 0);
    EXPECT_TRUE(b.holds(target(round), bytes, seed)) << "round " << round;
    if (round + 1 < rounds) {
      EXPECT_TRUE(b.holds(seen(round), bytes, seed)) << "round " << round;
    }
  }
  at.on->destroy_stream(streams[1]);
  b.finish();
}

void counts_that_disagree_are_named_to_all(const rank_context& at) {
  channel_bench b(at, {.check_counts = true});
  if (b.ranks() > 1) {
    std::vector<outgoing_block> out(static_cast<std::size_t>(b.ranks()));
    std::vector<incoming_block> in(out.size());
    if (b.me() == 0) out[1] = {.from = 0, .to = 64, .bytes = 24};
    if (b.me() == 1) in[0] = {.at = 64, .bytes = 16};
    const std::string said = thrown_by([&] { b.channel.all_to_all_v(out, in, b.stream); });
    EXPECT_EQ(said.find("invalid_argument"), 0u) << said;
    EXPECT_NE(said.find("rank 0 sends 24 bytes to offset 64 of rank 1, which expects 16 bytes"),
              std::string::npos)
        << said;
    if (b.me() == 1) in[0] = {.at = 64, .bytes = 24};
    b.channel.all_to_all_v(out, in, b.stream);
  }
  b.finish();
}

}  // namespace

void run_skewed_all_to_all(const rank_context& at, const channel_options& options) {
  channel_bench b(at, options);
  const std::size_t half = at.granule();
  const std::size_t slot = half / static_cast<std::size_t>(b.ranks()) / 8 * 8;
  std::mt19937 delays(static_cast<unsigned>(b.me()));
  for (std::uint64_t round = 1; round <= 5; ++round) {
    std::vector<outgoing_block> out;
    std::vector<incoming_block> in;
    for (int r = 0; r < b.ranks(); ++r) {
      const auto peer = static_cast<std::size_t>(r);
      out.push_back({.from = peer * slot,
                     .to = half + static_cast<std::size_t>(b.me()) * slot,
                     .bytes = skewed(round, b.me(), r, b.ranks(), slot)});
      in.push_back({.at = half + peer * slot, .bytes = skewed(round, r, b.me(), b.ranks(), slot)});
      if (out.back().bytes > 0) {
        b.write(out.back().from, out.back().bytes, seed_of(round, b.me(), r));
      }
    }
    dawdle(b, delays);
    b.channel.all_to_all_v(out, in, b.stream);
    b.channel.synchronize(b.stream);
    for (int r = 0; r < b.ranks(); ++r) {
      const incoming_block& block = in[static_cast<std::size_t>(r)];
      EXPECT_TRUE(b.holds(block.at, block.bytes, seed_of(round, r, b.me())))
          << "round " << round << " from rank " << r;
    }
  }
  b.finish();
}

const std::vector<symmetric_case>& channel_collective_cases() {
#define EVMM_CASE(name) \
  { #name, &name }
  static const std::vector<symmetric_case> all = {
      EVMM_CASE(all_to_all_v_moves_skewed_blocks),
      EVMM_CASE(no_block_is_written_before_its_receiver_is_there),
      EVMM_CASE(a_barrier_orders_the_streams_of_all_ranks),
      EVMM_CASE(calls_on_several_streams_come_as_they_are_made),
      EVMM_CASE(counts_that_disagree_are_named_to_all),
  };
#undef EVMM_CASE
  return all;
}

}  // namespace evmm::test
