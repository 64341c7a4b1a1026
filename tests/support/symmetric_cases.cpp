// SPDX-License-Identifier: Apache-2.0
#include "tests/support/symmetric_cases.hpp"

#include "tests/support/fault_driver.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/thread_ranks.hpp"

#include <evmm/error.hpp>
#include <evmm/units.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <utility>
#include <vector>

namespace evmm::test {

using namespace evmm::units;

namespace {

address address_of(const std::byte* at) {
  return reinterpret_cast<address>(at);
}

std::uint64_t seed_of(std::uint64_t seed, rank_id rank) {
  return seed * 100 + static_cast<std::uint64_t>(rank.value);
}

void grows_and_is_reached_by_every_peer(const rank_context& at) {
  auto region = at.make();
  EXPECT_EQ(region.rank(), at.ranks->rank());
  EXPECT_EQ(region.size(), 0u);
  const grown first = region.grow(tier::device, at.granule());
  const grown second = region.grow(tier::host, 2 * at.granule());
  EXPECT_EQ(first.offset, 0u);
  EXPECT_EQ(second.offset, at.granule());
  EXPECT_EQ(region.size(), 3 * at.granule());
  EXPECT_EQ(region.epoch(), 2u);
  for (const rank_id peer : at.ranks->node_ranks()) {
    EXPECT_TRUE(region.reachable(peer));
    EXPECT_EQ(region.segments(peer).size(), 2u);
  }
  EXPECT_EQ(region.peer(region.rank()), region.local());
  expect_shared(region, 1);
  region.close();
}

void handles_stay_within_the_node(const rank_context& outer) {
  rank_context at = outer;
  const auto counting = fault_driver::make(outer.on);
  at.on = counting;
  auto region = at.make();
  counting->clear_record();
  region.grow(tier::device, at.granule());
  region.grow(tier::host, at.granule());
  const auto calls = counting->record_of_calls();
  const auto count = [&](driver_call kind) {
    return static_cast<std::size_t>(std::count(calls.begin(), calls.end(), kind));
  };
  // Two handles from each other rank of the node, and not a single one from any other host.
  EXPECT_EQ(count(driver_call::import_fd) + count(driver_call::import_fabric),
            2 * (at.ranks->node_ranks().size() - 1));
  region.close();
}

void stores_into_a_peers_part_arrive(const rank_context& at) {
  auto region = at.make();
  region.grow(tier::device, at.granule());
  region.grow(tier::host, at.granule());
  // Each rank writes into its own slice of the next rank's part, across the tier boundary.
  const auto& here = at.ranks->node_ranks();
  const auto me = static_cast<std::size_t>(at.ranks->node_rank());
  const rank_id next = here[(me + 1) % here.size()];
  const rank_id previous = here[(me + here.size() - 1) % here.size()];
  const std::size_t from = at.granule() - 64_KiB;
  write_pattern(*at.on, address_of(region.peer(next) + from), 128_KiB, seed_of(7, at.ranks->rank()),
                at.device);
  at.ranks->barrier();
  EXPECT_TRUE(holds_pattern(*at.on, address_of(region.local() + from), 128_KiB,
                            seed_of(7, previous), at.device));
  region.close();
}

void tiers_may_differ_by_rank(const rank_context& at) {
  auto region = at.make();
  const auto tier_of = [](rank_id rank) { return rank.value % 2 == 0 ? tier::device : tier::host; };
  region.grow(tier_of(at.ranks->rank()), at.granule());
  region.grow(tier::host, at.granule());
  const symmetric_view view = region.view();
  EXPECT_EQ(view.ranks, static_cast<int>(at.ranks->node_ranks().size()));
  EXPECT_EQ(view.size, region.size());
  EXPECT_EQ(view.epoch, region.epoch());
  for (int r = 0; r < view.ranks; ++r) {
    const rank_id rank = at.ranks->node_ranks()[static_cast<std::size_t>(r)];
    EXPECT_EQ(region.segments(rank)[0].where.kind, tier_of(rank));
    EXPECT_EQ(view.on_host(r, 0), tier_of(rank) == tier::host);
    EXPECT_TRUE(view.on_host(r, at.granule()));
    EXPECT_EQ(reinterpret_cast<std::byte*>(view.peer(r)), region.peer(rank));
  }
  expect_shared(region, 2);
  // Host segments are the CPU's as well, a peer's too.
  auto* const word = reinterpret_cast<std::uint64_t*>(region.local() + at.granule());
  at.ranks->barrier();
  *word = 40 + static_cast<std::uint64_t>(at.ranks->rank().value);
  at.ranks->barrier();
  for (const rank_id peer : at.ranks->node_ranks()) {
    const auto* found = reinterpret_cast<std::uint64_t*>(region.peer(peer) + at.granule());
    EXPECT_EQ(*found, 40 + static_cast<std::uint64_t>(peer.value));
  }
  region.close();
}

void migrates_with_contents_even_on_some_ranks_only(const rank_context& at) {
  auto region = at.make();
  region.grow(tier::device, at.granule());
  region.grow(tier::device, at.granule());
  expect_shared(region, 3);
  const tier wanted = at.ranks->rank() == rank_id{0} ? tier::host : tier::device;
  region.migrate(1, wanted);
  EXPECT_EQ(region.epoch(), 3u);
  EXPECT_EQ(region.segments(region.rank())[1].where.kind, wanted);
  if (region.reachable({0})) {
    EXPECT_EQ(region.segments({0})[1].where.kind, tier::host);
  }
  expect_still_shared(region, 3);
  region.migrate(1, tier::host);
  region.migrate(1, tier::device);
  expect_still_shared(region, 3);
  const auto epoch = region.epoch();
  region.migrate(1, tier::device);
  EXPECT_EQ(region.epoch(), epoch) << "nobody moved";
  region.close();
}

void shrinks_and_grows_again_with_kept_handles(const rank_context& at) {
  auto region = at.make();
  region.grow(tier::device, at.granule());
  region.grow(tier::device, 2 * at.granule());
  expect_shared(region, 4);
  EXPECT_EQ(region.shrink(at.granule()), 0u);
  EXPECT_EQ(region.shrink(2 * at.granule()), 2 * at.granule());
  EXPECT_EQ(region.size(), at.granule());
  EXPECT_EQ(region.statistics().cached_bytes, 2 * at.granule());
  expect_still_shared(region, 4);
  region.grow(tier::device, 2 * at.granule());
  EXPECT_EQ(region.statistics().handles_reused, 1u);
  expect_shared(region, 5);
  region.close();
}

void sleeps_and_wakes_with_contents(const rank_context& at) {
  auto region = at.make();
  region.grow(tier::device, at.granule());
  region.grow(tier::host, at.granule());
  expect_shared(region, 6);
  region.discard(contents::backup);
  EXPECT_EQ(region.statistics().device_bytes, 0u);
  EXPECT_EQ(region.statistics().handles_released, 1u) << "the host's is its own backup";
  EXPECT_EQ(region.size(), 2 * at.granule());
  region.restore();
  expect_still_shared(region, 6);
  region.discard(contents::drop, {}, 1, 1);
  region.restore();
  expect_shared(region, 7);
  region.close();
}

void large_growth_is_cut_alike_on_all_ranks(const rank_context& at) {
  auto region = at.make({.max_segment_bytes = 2 * at.granule()});
  EXPECT_EQ(region.grow(tier::device, 3 * at.granule()).bytes, 3 * at.granule());
  EXPECT_EQ(region.segments(region.rank()).size(), 2u);
  EXPECT_EQ(region.epoch(), 1u);
  expect_shared(region, 12);
  region.close();
}

void different_arguments_are_an_error_for_all(const rank_context& at) {
  auto region = at.make();
  region.grow(tier::device, at.granule());
  expect_shared(region, 8);
  if (at.ranks->size() == 1) return;
  const bool odd = at.ranks->rank() == rank_id{1};
  const auto before = layout(region);
  std::string said =
      thrown_by_all(*at.ranks, [&] { region.grow(tier::device, at.granule() * (odd ? 2 : 1)); });
  EXPECT_EQ(said.find("invalid_argument"), 0u) << said;
  EXPECT_NE(said.find("rank 1 grow by 4.0 MiB"), std::string::npos) << said;
  said = thrown_by_all(*at.ranks, [&] {
    if (odd) {
      region.shrink(at.granule());
    } else {
      region.grow(tier::device, at.granule());
    }
  });
  EXPECT_NE(said.find("rank 1 shrink"), std::string::npos) << said;
  EXPECT_EQ(layout(region), before);
  expect_still_shared(region, 8);
  said = thrown_by_all(*at.ranks, [&] {
    symmetric_region(at.ranks, at.on,
                     {.device = at.device, .reserve = (odd ? 8 : 4) * at.granule()});
  });
  EXPECT_NE(said.find("`reserve` differs"), std::string::npos) << said;
  region.grow(tier::host, at.granule());
  expect_shared(region, 9);
  region.close();
}

void wrong_calls_are_refused_alike(const rank_context& at) {
  auto region = at.make({.reserve = 4 * at.granule()});
  const auto says = [&](const std::function<void()>& call) {
    return thrown_by_all(*at.ranks, call);
  };
  EXPECT_NE(says([&] { region.grow(tier::device, 0); }).find("0 bytes"), std::string::npos);
  EXPECT_NE(says([&] { region.grow(tier::host, 5 * at.granule()); }).find("reserve"),
            std::string::npos);
  EXPECT_NE(says([&] { region.migrate(0, tier::host); }).find("no segment 0"), std::string::npos);
  EXPECT_NE(says([&] { region.discard(contents::drop, {}, 3); }).find("no segment 3"),
            std::string::npos);
  EXPECT_NE(says([&] { (void)region.peer({99}); }).find("no rank 99"), std::string::npos);
  EXPECT_NE(
      says([&] { symmetric_region(at.ranks, at.on, {.device = {99}, .reserve = 1}); }).find("99"),
      std::string::npos);
  EXPECT_EQ(region.epoch(), 0u);
  region.grow(tier::device, at.granule());
  region.close();
  region.close();
  EXPECT_NE(says([&] { region.grow(tier::device, 1); }).find("was closed"), std::string::npos);
  EXPECT_NE(says([&] { (void)region.view(); }).find("was closed"), std::string::npos);
  EXPECT_EQ(region.size(), 0u);
}

/// What collective observers were asked, in order.
std::string log_of_collective_observers(const rank_context& at, symmetric_region& region,
                                        bool refuses, const std::function<void()>& act) {
  std::string log;
  const auto note = [&](const char* what) {
    return [&log, what](const region_change& change) {
      log += std::string(what) + ' ' + to_string(change.kind) + (change.committed ? "!" : "") + ' ';
    };
  };
  const auto up = [&](const region_change& change, const region_part& part) {
    note("up")(change);
    log += std::to_string(part.segments.size()) + ' ';
    EXPECT_EQ(part.base, region.local());
    at.ranks->barrier("all ranks are here");
  };
  const auto first =
      region.follow({.before_change = note("ask"), .take_down = note("down"), .bring_up = up});
  const auto second = region.follow({.take_down = [&](const region_change&) {
    log += "second ";
    if (refuses) throw unsupported("cannot come down");
  }});
  log += thrown_by_all(*at.ranks, act).substr(0, 30);
  return log;
}

void collective_observers_go_down_and_come_up_together(const rank_context& at) {
  auto region = at.make();
  region.grow(tier::device, at.granule());
  expect_shared(region, 21);
  const auto act = [&] { region.migrate(0, tier::host); };
  const bool last = at.ranks->rank().value == at.ranks->size() - 1;
  EXPECT_EQ(log_of_collective_observers(at, region, last, act).substr(0, 49),
            "ask migrate down migrate second up migrate 1 unsu");
  EXPECT_EQ(region.epoch(), 1u);
  expect_still_shared(region, 21);
  EXPECT_EQ(log_of_collective_observers(at, region, false, act),
            "ask migrate down migrate second up migrate! 1 ");
  expect_still_shared(region, 21);
  EXPECT_GT(region.last_change().map.count(), 0);
  EXPECT_GT(region.last_change().bring_up.count(), 0);
  region.close();
}

void one_ranks_observer_vetoes_for_all(const rank_context& at) {
  auto region = at.make();
  region.grow(tier::device, at.granule());
  expect_shared(region, 10);
  const rank_id last{at.ranks->size() - 1};
  int undone = 0;
  const auto subscription = region.observe(
      {.before_change =
           [&](const region_change&) {
             if (at.ranks->rank() == last) throw unsupported("in use by a graph");
           },
       .after_change = [&](const region_change& change) { undone += change.committed ? 0 : 1; }});
  const auto said = thrown_by_all(*at.ranks, [&] { region.migrate(0, tier::host); });
  EXPECT_EQ(said.find("unsupported: rank " + std::to_string(last.value)), 0u) << said;
  EXPECT_EQ(undone, at.ranks->rank() == last ? 0 : 1);
  EXPECT_EQ(region.segments(region.rank())[0].where.kind, tier::device);
  expect_still_shared(region, 10);
}

void the_same_address_everywhere_when_asked_for(const rank_context& at) {
  auto region = at.make({.same_address = true});
  const auto bases = at.ranks->all_gather_value(address_of(region.local()) -
                                                static_cast<std::size_t>(at.ranks->node_rank()) *
                                                    region.reserved());
  const bool equal =
      std::all_of(bases.begin(), bases.end(), [&](address base) { return base == bases.front(); });
  EXPECT_EQ(region.same_address(), equal);
  region.grow(tier::device, at.granule());
  expect_shared(region, 11);
  region.close();
}

void changes_elsewhere_do_not_stall_a_busy_stream(const rank_context& at) {
  auto region = at.make();
  for (int i = 0; i < 2; ++i) region.grow(tier::device, at.granule());
  const native_stream busy = at.on->create_stream(at.device);
  {
    stream_gate gate(*at.on, busy);
    gate.wait_reached();
    at.on->fill(address_of(region.local()), std::byte{9}, at.granule(), busy);
    region.grow(tier::host, at.granule());
    region.migrate(1, tier::host);
    EXPECT_FALSE(at.on->idle(busy));
  }
  at.on->synchronize(busy);
  std::vector<std::byte> found(at.granule());
  at.on->copy(address_of(found.data()), address_of(region.local()), found.size(), busy);
  at.on->synchronize(busy);
  EXPECT_EQ(found, std::vector<std::byte>(at.granule(), std::byte{9}));
  at.on->destroy_stream(busy);
  region.close();
}

void compacts_runs_of_one_tier_with_contents_in_place(const rank_context& at) {
  auto region = at.make();
  for (int i = 0; i < 3; ++i) region.grow(tier::device, at.granule());
  region.grow(tier::host, at.granule());
  region.grow(tier::host, 2 * at.granule());
  region.grow(tier::device, at.granule());
  // Where one rank has another tier than the rest, nothing can be merged across.
  region.migrate(0, at.ranks->rank() == rank_id{0} ? tier::host : tier::device);
  expect_shared(region, 9);
  EXPECT_EQ(region.compact({}, 2, 2), 6u) << "one of each tier";
  EXPECT_EQ(region.epoch(), 7u) << "nothing changed";
  EXPECT_EQ(region.compact(), 4u);
  EXPECT_EQ(region.epoch(), 8u);
  for (const rank_id peer : at.ranks->node_ranks()) {
    const auto held = region.segments(peer);
    ASSERT_EQ(held.size(), 4u);
    EXPECT_EQ(held[1].bytes, 2 * at.granule());
    EXPECT_EQ(held[2].offset, 3 * at.granule());
    EXPECT_EQ(held[2].bytes, 3 * at.granule());
    EXPECT_EQ(held[2].where.kind, tier::host);
    EXPECT_EQ(held[3].offset, 6 * at.granule());
  }
  expect_still_shared(region, 9);
  region.migrate(0, tier::device);
  EXPECT_EQ(region.compact(), 3u);
  expect_still_shared(region, 9);
  EXPECT_EQ(region.statistics().compactions, 2u);
  region.migrate(1, tier::device);
  region.discard(contents::backup, {}, 1, 1);
  EXPECT_EQ(region.compact(), 3u) << "a discarded segment is left alone";
  region.restore();
  EXPECT_EQ(region.compact(), 1u);
  expect_still_shared(region, 9);
  region.close();
}

void calls_on_different_regions_are_an_error_for_all(const rank_context& at) {
  auto first = at.make();
  auto second = at.make();
  for (auto* region : {&first, &second}) {
    region->grow(tier::device, at.granule());
    region->grow(tier::device, at.granule());
  }
  const bool last = at.ranks->rank().value == at.ranks->size() - 1;
  auto& mine = last ? second : first;
  for (const auto& change : std::vector<std::function<void()>>{
           [&] { mine.grow(tier::device, at.granule()); },
           [&] { mine.shrink(at.granule()); },
           [&] { mine.discard(contents::drop); },
       }) {
    if (at.ranks->size() == 1) break;
    const auto said = thrown_by_all(*at.ranks, change);
    EXPECT_EQ(said.find("invalid_argument: ranks ask for different changes"), 0u) << said;
    EXPECT_NE(said.find("another region"), std::string::npos) << said;
  }
  EXPECT_EQ(first.epoch(), 2u);
  EXPECT_EQ(second.epoch(), 2u);
  expect_shared(first, 31);
  expect_shared(second, 32);
  second.close();
  first.close();
}

void a_close_that_fails_leaves_the_region_and_its_observers(const rank_context& at) {
  auto region = at.make();
  region.grow(tier::device, at.granule());
  int gone = 0;
  const auto follows = region.follow({.gone = [&] { ++gone; }});
  const native_stream stream = at.on->create_stream(at.device);
  const bool last = at.ranks->rank().value == at.ranks->size() - 1;
  if (last) at.on->launch(stream, [] { throw std::runtime_error("a kernel that failed"); });
  const auto said = thrown_by_all(*at.ranks, [&] { region.close({.streams = {&stream, 1}}); });
  EXPECT_NE(said.find("a kernel that failed"), std::string::npos) << said;
  EXPECT_EQ(gone, 0);
  expect_shared(region, 33);
  region.close({.streams = {&stream, 1}});
  EXPECT_EQ(gone, 1);
  at.on->destroy_stream(stream);
  { const symmetric_region ends = std::move(region); }
  EXPECT_EQ(gone, 1) << "told once";
}

}  // namespace

symmetric_region rank_context::make(symmetric_options options) const {
  options.device = device;
  if (options.reserve == 0) options.reserve = 32 * granule();
  return {ranks, on, options};
}

const std::vector<symmetric_case>& symmetric_cases() {
#define EVMM_CASE(name) \
  { #name, &name }
  static const std::vector<symmetric_case> all = {
      EVMM_CASE(grows_and_is_reached_by_every_peer),
      EVMM_CASE(handles_stay_within_the_node),
      EVMM_CASE(stores_into_a_peers_part_arrive),
      EVMM_CASE(tiers_may_differ_by_rank),
      EVMM_CASE(migrates_with_contents_even_on_some_ranks_only),
      EVMM_CASE(compacts_runs_of_one_tier_with_contents_in_place),
      EVMM_CASE(shrinks_and_grows_again_with_kept_handles),
      EVMM_CASE(sleeps_and_wakes_with_contents),
      EVMM_CASE(large_growth_is_cut_alike_on_all_ranks),
      EVMM_CASE(different_arguments_are_an_error_for_all),
      EVMM_CASE(wrong_calls_are_refused_alike),
      EVMM_CASE(calls_on_different_regions_are_an_error_for_all),
      EVMM_CASE(a_close_that_fails_leaves_the_region_and_its_observers),
      EVMM_CASE(collective_observers_go_down_and_come_up_together),
      EVMM_CASE(one_ranks_observer_vetoes_for_all),
      EVMM_CASE(the_same_address_everywhere_when_asked_for),
      EVMM_CASE(changes_elsewhere_do_not_stall_a_busy_stream),
  };
#undef EVMM_CASE
  return all;
}

void expect_shared(const symmetric_region& region, std::uint64_t seed) {
  write_pattern(region.on(), address_of(region.local()), region.size(),
                seed_of(seed, region.rank()), region.device());
  expect_still_shared(region, seed);
}

void expect_still_shared(const symmetric_region& region, std::uint64_t seed) {
  region.ranks().barrier("test: written");
  for (const rank_id peer : region.ranks().node_ranks()) {
    EXPECT_TRUE(holds_pattern(region.on(), address_of(region.peer(peer)), region.size(),
                              seed_of(seed, peer), region.device()))
        << "rank " << peer.value << " as rank " << region.rank().value << " sees it";
  }
  region.ranks().barrier("test: read");
}

std::string layout(const symmetric_region& region) {
  std::string text = std::to_string(region.size()) + " epoch " + std::to_string(region.epoch());
  for (const rank_id peer : region.ranks().node_ranks()) {
    text += " |";
    for (const segment& held : region.segments(peer)) {
      text += " " + std::to_string(held.offset) + "+" + std::to_string(held.bytes) + "@" +
              to_string(held.where) + (held.state == segment_state::mapped ? "" : "!");
    }
  }
  return text;
}

}  // namespace evmm::test
