// SPDX-License-Identifier: Apache-2.0
#include "tests/support/channel_cases.hpp"

#include "tests/support/patterns.hpp"
#include "tests/support/thread_ranks.hpp"

#include <evmm/comm/symmetric_channel.hpp>
#include <evmm/error.hpp>
#include <evmm/units.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <thread>

namespace evmm::test {

using namespace evmm::units;

namespace {

constexpr std::size_t k_chunk = 64_KiB;  // small, so that messages are cut

/// A region, a channel on it and a stream, on one rank.
struct bench {
  explicit bench(const rank_context& context,
                 const channel_options& options = {.chunk_bytes = k_chunk, .chunks = 3})
      : at(context),
        region(grown_region(context)),
        channel(region, options),
        stream(context.on->create_stream(context.device)) {}
  bench(const bench&) = delete;
  bench& operator=(const bench&) = delete;
  ~bench() { at.on->destroy_stream(stream); }

  static symmetric_region grown_region(const rank_context& context) {
    symmetric_region made = context.make();
    made.grow(tier::device, context.granule());
    made.grow(tier::host, context.granule());
    return made;
  }

  int ranks() const { return at.ranks->size(); }
  int me() const { return at.ranks->rank().value; }
  address own(std::size_t offset) const {
    return reinterpret_cast<address>(region.local()) + offset;
  }
  std::span<const std::byte> part(std::size_t offset, std::size_t bytes) const {
    return {region.local() + offset, bytes};
  }
  void write(std::size_t offset, std::size_t bytes, std::uint64_t seed) const {
    write_pattern(*at.on, own(offset), bytes, seed, at.device);
  }
  bool holds(std::size_t offset, std::size_t bytes, std::uint64_t seed) const {
    return bytes == 0 || holds_pattern(*at.on, own(offset), bytes, seed, at.device);
  }
  /// Zeroes words of this rank's part, before anybody signals there.
  void clear_words(std::size_t offset, std::size_t count) {
    at.on->fill(own(offset), std::byte{0}, 8 * count, stream);
    channel.synchronize(stream);
    at.ranks->barrier("test: words are zero");
  }
  void finish() {
    channel.synchronize(stream);
    channel.close();
    region.close();
  }

  const rank_context& at;
  symmetric_region region;
  symmetric_channel channel;
  native_stream stream;
};

std::uint64_t seed_of(std::uint64_t round, int from, int to) {
  return round * 10'000 + static_cast<std::uint64_t>(from) * 100 + static_cast<std::uint64_t>(to);
}

/// Something of random length between two operations of a stream, to shift ranks against each
/// other.
void dawdle(const bench& b, std::mt19937& random) {
  const unsigned turns = random() % 64;
  b.at.on->launch(b.stream, [turns] {
    for (unsigned i = 0; i < turns; ++i) std::this_thread::yield();
  });
}

void puts_and_gets_reach_every_rank(const rank_context& at) {
  bench b(at);
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
  bench b(at);
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
  bench b(at);
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
  bench b(at);
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
  bench b(at);
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
    bench b(at, {.chunk_bytes = k_chunk, .chunks = 2, .check_counts = checked});
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
        in.push_back(
            {.at = half + peer * slot, .bytes = skewed(round, r, b.me(), b.ranks(), slot)});
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
}

void no_block_is_written_before_its_receiver_is_there(const rank_context& at) {
  bench b(at);
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
  bench b(at);
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

void goes_on_while_the_region_changes(const rank_context& at) {
  bench b(at);
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
  bench b(at);
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
  b.channel.barrier(b.stream);  // refusals break nothing
  b.channel.synchronize(b.stream);
  b.channel.close();
  b.channel.close();
  says([&] { b.channel.barrier(b.stream); }, "was closed");

  says([&] { symmetric_channel(b.region, {.chunk_bytes = 1}); }, "chunk_bytes is 1");
  if (b.ranks() > 1) {
    says([&] { symmetric_channel(b.region, {.chunk_bytes = b.me() == 1 ? 8192u : 4096u}); },
         "rank 1 gave 8192");
  }
  b.region.close();
}

void counts_that_disagree_are_named_to_all(const rank_context& at) {
  bench b(at, {.check_counts = true});
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

const std::vector<symmetric_case>& channel_cases() {
#define EVMM_CASE(name) \
  { #name, &name }
  static const std::vector<symmetric_case> all = {
      EVMM_CASE(puts_and_gets_reach_every_rank),
      EVMM_CASE(says_which_path_it_took),
      EVMM_CASE(a_signal_follows_its_bytes),
      EVMM_CASE(a_target_need_not_call_anything),
      EVMM_CASE(random_traffic_arrives_byte_for_byte),
      EVMM_CASE(all_to_all_v_moves_skewed_blocks),
      EVMM_CASE(no_block_is_written_before_its_receiver_is_there),
      EVMM_CASE(a_barrier_orders_the_streams_of_all_ranks),
      EVMM_CASE(goes_on_while_the_region_changes),
      EVMM_CASE(wrong_calls_are_refused_with_value_and_limit),
      EVMM_CASE(counts_that_disagree_are_named_to_all),
  };
#undef EVMM_CASE
  return all;
}

}  // namespace evmm::test
