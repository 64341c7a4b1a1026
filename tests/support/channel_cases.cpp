// SPDX-License-Identifier: Apache-2.0
#include "tests/support/channel_bench.hpp"
#include "tests/support/thread_ranks.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <optional>

namespace evmm::test {

namespace {

void puts_and_gets_reach_every_rank(const rank_context& at) {
  channel_bench b(at);
  const std::size_t slot = 2 * at.granule() / (2 * static_cast<std::size_t>(b.ranks()) + 2) / 8 * 8;
  const auto n = static_cast<std::size_t>(b.ranks());
  // Own patterns lie in the first half, what others put in the second.
  for (int to = 0; to < b.ranks(); ++to) {
    b.write(static_cast<std::size_t>(to) * slot, slot, seed_of(1, b.me(), to));
  }
  for (int to = 0; to < b.ranks(); ++to) {
    b.channel.put({to}, (n + static_cast<std::size_t>(b.me())) * slot,
                  b.part(static_cast<std::size_t>(to) * slot, slot), b.stream);
  }
  b.channel.barrier(b.stream);
  b.channel.synchronize(b.stream);
  for (int from = 0; from < b.ranks(); ++from) {
    EXPECT_TRUE(
        b.holds((n + static_cast<std::size_t>(from)) * slot, slot, seed_of(1, from, b.me())))
        << "rank " << b.me() << " has from rank " << from;
  }
  std::vector<std::byte> got(slot);
  for (int from = 0; from < b.ranks(); ++from) {
    const std::size_t of = static_cast<std::size_t>((from + 1) % b.ranks());
    b.channel.get({from}, of * slot, got, b.stream);
    b.channel.synchronize(b.stream);
    EXPECT_TRUE(holds_pattern(*at.on, reinterpret_cast<address>(got.data()), slot,
                              seed_of(1, from, static_cast<int>(of)), at.device))
        << "rank " << b.me() << " gets of rank " << from;
  }
  b.finish();
}

void says_which_path_it_took(const rank_context& at) {
  channel_bench b(at);
  std::size_t far = 0;
  std::size_t near = 0;
  for (int r = 0; r < b.ranks(); ++r) {
    const bool here = b.region.reachable({r});
    const channel_path expected = r == b.me() ? channel_path::local
                                  : here      ? channel_path::direct
                                              : channel_path::link;
    EXPECT_EQ(b.channel.path_to({r}), expected) << to_string(b.channel.path_to({r}));
    if (expected == channel_path::direct) ++near;
    if (expected == channel_path::link) ++far;
    b.channel.put({r}, 0, b.part(4096, 4096), b.stream);
  }
  b.channel.barrier(b.stream);
  b.channel.synchronize(b.stream);
  const channel_statistics counts = b.channel.statistics();
  EXPECT_EQ(counts.local_bytes, 4096u);
  EXPECT_EQ(counts.direct_bytes, near * 4096);
  EXPECT_EQ(counts.link_bytes, far * 4096);
  EXPECT_EQ(counts.link_messages, 3 * far) << "the bytes and the barrier's words";
  EXPECT_EQ(counts.link_bytes_received, far * 4096);
  EXPECT_EQ(counts.link.empty(), at.ranks->node_count() == 1);
  b.finish();
}

void a_signal_follows_its_bytes(const rank_context& at) {
  channel_bench b(at);
  constexpr std::size_t words = 0;
  const std::size_t data = at.granule() - 128_KiB;  // across the tiers
  constexpr std::size_t bytes = 200'000;
  b.clear_words(words, 2);
  const rank_id next{(b.me() + 1) % b.ranks()};
  const rank_id previous{(b.me() + b.ranks() - 1) % b.ranks()};
  std::vector<std::byte> source(bytes);
  std::vector<std::byte> seen(bytes);
  std::mt19937 random(static_cast<unsigned>(b.me()));
  for (std::uint64_t round = 1; round <= 10; ++round) {
    write_pattern(*at.on, reinterpret_cast<address>(source.data()), bytes,
                  seed_of(round, b.me(), next.value), at.device);
    dawdle(b, random);
    b.channel.put_signal(next, data, source, {words, round}, b.stream);
    b.channel.wait_signal(previous, {words, round}, b.stream);
    dawdle(b, random);
    at.on->copy(reinterpret_cast<address>(seen.data()), b.own(data), bytes, b.stream);
    // The next round's bytes may come once these were read.
    b.channel.signal(previous, {words + 8, round}, b.stream);
    b.channel.wait_signal(next, {words + 8, round}, b.stream);
    b.channel.synchronize(b.stream);
    EXPECT_TRUE(holds_pattern(*at.on, reinterpret_cast<address>(seen.data()), bytes,
                              seed_of(round, previous.value, b.me()), at.device))
        << "round " << round;
  }
  b.finish();
}

void a_target_need_not_call_anything(const rank_context& at) {
  channel_bench b(at);
  constexpr std::size_t bytes = 300'000;
  const rank_id last{b.ranks() - 1};
  if (b.me() == 0) {
    std::vector<std::byte> sent(bytes);
    std::vector<std::byte> back(bytes);
    write_pattern(*at.on, reinterpret_cast<address>(sent.data()), bytes, 5, at.device);
    b.channel.put(last, 4096, sent, b.stream);
    b.channel.get(last, 4096, back, b.stream);
    b.channel.synchronize(b.stream);
    EXPECT_EQ(back, sent);
  }
  at.ranks->barrier("test: rank 0 is through");
  b.finish();
}

void random_traffic_arrives_byte_for_byte(const rank_context& at) {
  channel_bench b(at);
  const auto n = static_cast<std::size_t>(b.ranks());
  const std::size_t slot = 2 * at.granule() / n;
  const std::size_t most = std::min<std::size_t>(slot, 400'000);
  std::mt19937 plan(42);  // the same on all ranks
  std::mt19937 delays(static_cast<unsigned>(b.me()) + 1);
  for (std::uint64_t round = 1; round <= 6; ++round) {
    struct move {
      std::size_t offset, bytes;
    };
    std::vector<std::vector<move>> moves(n, std::vector<move>(n));
    for (auto& of_rank : moves) {
      for (move& each : of_rank) {
        each.bytes = plan() % 4 == 0 ? 0 : plan() % most;
        each.offset = plan() % (slot - each.bytes);
      }
    }
    const auto me = static_cast<std::size_t>(b.me());
    std::vector<std::vector<std::byte>> sources(n);
    for (std::size_t to = 0; to < n; ++to) {
      sources[to].resize(moves[me][to].bytes);
      if (sources[to].empty()) continue;
      write_pattern(*at.on, reinterpret_cast<address>(sources[to].data()), sources[to].size(),
                    seed_of(round, b.me(), static_cast<int>(to)), at.device);
    }
    for (std::size_t i = 0; i < n; ++i) {
      const std::size_t to = (me + i) % n;
      dawdle(b, delays);
      b.channel.put({static_cast<int>(to)}, me * slot + moves[me][to].offset, sources[to],
                    b.stream);
    }
    b.channel.barrier(b.stream);
    b.channel.synchronize(b.stream);
    for (std::size_t from = 0; from < n; ++from) {
      EXPECT_TRUE(b.holds(from * slot + moves[from][me].offset, moves[from][me].bytes,
                          seed_of(round, static_cast<int>(from), b.me())))
          << "round " << round << " from rank " << from;
    }
    // And what one rank reads of another is what a third one wrote there.
    const std::size_t of = plan() % n;
    const std::size_t by = plan() % n;
    std::vector<std::byte> got(moves[by][of].bytes);
    b.channel.get({static_cast<int>(of)}, by * slot + moves[by][of].offset, got, b.stream);
    b.channel.barrier(b.stream);  // nobody writes before all have read
    b.channel.synchronize(b.stream);
    if (got.empty()) continue;
    EXPECT_TRUE(holds_pattern(*at.on, reinterpret_cast<address>(got.data()), got.size(),
                              seed_of(round, static_cast<int>(by), static_cast<int>(of)),
                              at.device));
  }
  b.finish();
}

void goes_on_while_the_region_changes(const rank_context& at) {
  channel_bench b(at);
  const rank_id next{(b.me() + 1) % b.ranks()};
  const rank_id previous{(b.me() + b.ranks() - 1) % b.ranks()};
  for (std::uint64_t round = 1; round <= 4; ++round) {
    // Some ranks know of the new bytes before others do, and use them at once.
    const grown added = b.region.grow(round % 2 == 0 ? tier::device : tier::host, at.granule());
    std::vector<std::byte> source(added.bytes);
    write_pattern(*at.on, reinterpret_cast<address>(source.data()), source.size(),
                  seed_of(round, b.me(), next.value), at.device);
    b.channel.put(next, added.offset, source, b.stream);
    b.channel.barrier(b.stream);
    const std::array in_use{b.stream};
    b.region.migrate(b.region.segments(b.region.rank()).size() - 1,
                     round % 2 == 0 ? tier::host : tier::device, {.streams = in_use});
    b.channel.check();
    EXPECT_TRUE(b.holds(added.offset, added.bytes, seed_of(round, previous.value, b.me())));
    std::vector<std::byte> got(added.bytes);
    b.channel.get(next, added.offset, got, b.stream);
    b.channel.synchronize(b.stream);
    EXPECT_EQ(got, source);
  }
  b.channel.barrier(b.stream);
  b.finish();
}

void wrong_calls_are_refused_with_value_and_limit(const rank_context& at) {
  channel_bench b(at);
  const std::size_t size = b.region.size();
  const auto says = [&](const std::function<void()>& call, const std::string& part) {
    const std::string said = thrown_by(call);
    EXPECT_EQ(said.find("invalid_argument"), 0u) << said;
    EXPECT_NE(said.find(part), std::string::npos) << said;
  };
  says(
      [&] { b.channel.put({0}, size - 8, b.part(0, 16), b.stream); },
      "16 bytes at offset " + std::to_string(size - 8) + " end beyond the " + std::to_string(size));
  says([&] { b.channel.put({0}, ~std::size_t{0}, b.part(0, 16), b.stream); }, "beyond");
  says([&] { b.channel.put({b.ranks()}, 0, b.part(0, 16), b.stream); },
       "no rank " + std::to_string(b.ranks()));
  says([&] { b.channel.signal({0}, {12, 1}, b.stream); }, "offset 12: it lies at a multiple of 8");
  says([&] { b.channel.wait_signal({0}, {size, 1}, b.stream); }, "a signal: 8 bytes at offset");
  std::vector<std::byte> room(16);
  says([&] { b.channel.get({-1}, 0, room, b.stream); }, "no rank -1");
  says([&] { b.channel.all_to_all_v({}, {}, b.stream); }, "0 blocks out and 0 in");
  b.region.discard(contents::drop, {}, 1, 1);
  const std::size_t gone = size - at.granule();
  const std::string unbacked = std::to_string(at.granule()) + " bytes at offset " +
                               std::to_string(gone) + " of the region are discarded";
  says([&] { b.channel.put({0}, size - 16, b.part(0, 16), b.stream); }, unbacked);
  says([&] { b.channel.get({b.ranks() - 1}, gone - 8, room, b.stream); }, unbacked);
  says([&] { b.channel.signal({0}, {gone, 1}, b.stream); }, unbacked);
  b.region.restore();
  b.channel.put({b.me()}, size - 16, b.part(0, 16), b.stream);
  b.channel.barrier(b.stream);  // refusals break nothing
  b.channel.synchronize(b.stream);
  b.channel.close();
  b.channel.close();
  says([&] { b.channel.barrier(b.stream); }, "was closed");

  says([&] { symmetric_channel(b.region, {.chunk_bytes = 1}); }, "chunk_bytes is 1");
  if (b.ranks() > 1) {
    says([&] { symmetric_channel(b.region, {.chunk_bytes = b.me() == 1 ? 8192u : 4096u}); },
         "rank 1 gave chunk_bytes 8192");
  }
  b.region.close();
}

/// A rank that was late sends to one that has given up; then all make another channel.
void what_nobody_received_is_not_the_next_channels(const rank_context& at) {
  symmetric_region region = channel_bench::grown_region(at);
  const native_stream stream = at.on->create_stream(at.device);
  const rank_id me = at.ranks->rank();
  const rank_id last{at.ranks->size() - 1};
  at.on->fill(reinterpret_cast<address>(region.local()), std::byte{0}, 16, stream);
  at.on->synchronize(stream);
  std::optional<symmetric_channel> first(std::in_place, region);
  at.ranks->barrier("test: the first is there");
  if (me == last) first.reset();
  at.ranks->barrier("test: the last rank has given up");
  if (me == rank_id{0} && first) {
    first->signal(last, {0, 77}, stream);
    first->synchronize(stream);
  }
  const bool directly = region.reachable(last);
  at.ranks->barrier("test: rank 0 has sent");
  first.reset();
  symmetric_channel second(region);
  if (me == rank_id{0}) second.signal(last, {8, 1}, stream);
  if (me == last) second.wait_signal({0}, {8, 1}, stream);
  second.synchronize(stream);
  second.close();
  std::array<std::uint64_t, 2> words{};
  at.on->copy(reinterpret_cast<address>(words.data()), reinterpret_cast<address>(region.local()),
              sizeof words, stream);
  at.on->synchronize(stream);
  if (me == last) {
    if (!directly) {
      EXPECT_EQ(words[0], 0u) << "what the first channel sent";
    }
    EXPECT_EQ(words[1], 1u);
  }
  at.on->destroy_stream(stream);
  region.close();
}

}  // namespace

const std::vector<symmetric_case>& channel_cases() {
#define EVMM_CASE(name) \
  { #name, &name }
  static const std::vector<symmetric_case> all = {
      EVMM_CASE(puts_and_gets_reach_every_rank),
      EVMM_CASE(says_which_path_it_took),
      EVMM_CASE(a_signal_follows_its_bytes),
      EVMM_CASE(a_target_need_not_call_anything),
      EVMM_CASE(random_traffic_arrives_byte_for_byte),
      EVMM_CASE(goes_on_while_the_region_changes),
      EVMM_CASE(wrong_calls_are_refused_with_value_and_limit),
      EVMM_CASE(what_nobody_received_is_not_the_next_channels),
  };
#undef EVMM_CASE
  return all;
}

}  // namespace evmm::test
