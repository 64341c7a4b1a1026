// SPDX-License-Identifier: Apache-2.0
#include "tests/support/table_cases.hpp"

#include "tests/support/fault_driver.hpp"
#include "tests/support/scoped_capture.hpp"
#include "tests/support/table_rank.hpp"
#include "tests/support/thread_ranks.hpp"

#include <evmm/comm/symmetric_buffer.hpp>
#include <evmm/comm/symmetric_channel.hpp>
#include <evmm/error.hpp>
#include <evmm/units.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <limits>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>

namespace evmm::test {

using namespace evmm::units;
using ::testing::HasSubstr;

namespace {

constexpr ep::gather_options k_as_given{.order = ep::gather_order::as_given};
constexpr ep::gather_options k_by_address{.order = ep::gather_order::by_address};

std::uint64_t own_seed(const rank_context& at, std::uint64_t seed) {
  return seed * 100 + static_cast<std::uint64_t>(at.ranks->rank().value);
}

void rows_of_all_ranks_arrive(const rank_context& at) {
  // 2,064 is no multiple of what a warp takes of a row at a time.
  for (const std::size_t row_bytes : {128u, 144u, 1024u, 2064u, 16384u}) {
    table_rank mine(at, {.rows = 1001, .row_bytes = row_bytes}, 777);
    mine.fill(1);
    for (const auto& how : {k_as_given, k_by_address, ep::gather_options{.sms = 1}}) {
      for (const std::size_t count : {0u, 1u, 33u, 777u}) {
        EXPECT_EQ(mine.gather(random_indices(count, 1001, own_seed(at, count), 3, 5), how), 0u)
            << count << " rows of " << row_bytes << " bytes";
      }
    }
    mine.table().check(mine.stream());
    mine.meet();
  }
}

void the_last_rank_may_have_no_rows(const rank_context& at) {
  table_rank mine(at, {.rows = 5, .row_bytes = 128}, 64);
  mine.fill(2);
  EXPECT_EQ(mine.gather(random_indices(64, 5, own_seed(at, 1)), k_by_address), 0u);
  mine.meet();
}

void rows_lie_in_the_tiers_asked_for(const rank_context& at) {
  const auto ranks = static_cast<std::size_t>(at.ranks->size());
  constexpr std::size_t each = 12_MiB / 512;
  const auto bytes_on_host = [&](const ep::table_options& options) {
    table_rank mine(at, options, 500);
    mine.fill(3);
    EXPECT_EQ(mine.gather(random_indices(500, options.rows, own_seed(at, 2)), k_by_address), 0u);
    mine.meet();
    return mine.table().host_bytes();
  };
  ep::table_options options{.rows = ranks * each, .row_bytes = 512};
  EXPECT_EQ(bytes_on_host(options), ranks * 12_MiB);
  options.tiers = tier_policy::device_only;
  EXPECT_EQ(bytes_on_host(options), 0u);
  options.tiers = tier_policy::device_first;
  EXPECT_EQ(bytes_on_host(options), 0u) << "there is room";
  options.device_rows = 4_MiB / 512;
  EXPECT_EQ(bytes_on_host(options), ranks * 8_MiB);
  options.device_rows = 2 * each;
  EXPECT_EQ(bytes_on_host(options), 0u);
}

void duplicates_are_loaded_once(const rank_context& at) {
  table_rank mine(at, {.rows = 5000, .row_bytes = 256}, 4096);
  mine.fill(4);
  const auto indices = random_indices(4096, 5000, own_seed(at, 3), 2);
  const std::set<std::int64_t> distinct(indices.begin(), indices.end());
  EXPECT_EQ(mine.gather(indices, k_by_address), 0u);
  const auto counted = mine.table().statistics(mine.stream());
  EXPECT_EQ(counted.gathered, indices.size());
  EXPECT_EQ(counted.hits, 0u);
  EXPECT_GE(counted.fetched, distinct.size());
  EXPECT_LE(counted.fetched, distinct.size() + indices.size() / 32);
  // In the order given only those among 32 neighbours are found.
  EXPECT_EQ(mine.gather(std::vector<std::int64_t>(4096, 17), k_as_given), 0u);
  EXPECT_EQ(mine.table().statistics(mine.stream()).fetched, counted.fetched + 4096 / 32);
  mine.meet();
}

void a_gather_of_more_than_a_batch_is_done_in_parts(const rank_context& at) {
  table_rank mine(at, {.rows = 3000, .row_bytes = 128, .max_batch = 100}, 1024);
  mine.fill(5);
  auto indices = random_indices(1024, 3000, own_seed(at, 4), 0, 7);
  EXPECT_EQ(mine.gather(indices, k_by_address), 0u);
  EXPECT_EQ(mine.gather(indices, k_as_given), 0u);
  EXPECT_EQ(mine.table().statistics(mine.stream()).gathered, 2048u);
  indices[777] = 3000;
  EXPECT_EQ(mine.gather(indices, k_by_address), 0u);
  EXPECT_THAT(thrown_by([&] { mine.table().check(mine.stream()); }),
              HasSubstr("index 3000 at place 777: there are 3000 rows"));
  mine.meet();
}

void wrong_indices_touch_nothing_and_are_named(const rank_context& at) {
  table_rank mine(at, {.rows = 100, .row_bytes = 128, .cache_rows = 8}, 64);
  mine.fill(6);
  for (const auto& how : {k_as_given, k_by_address}) {
    for (const std::int64_t index :
         {std::int64_t{100}, std::int64_t{-2}, std::numeric_limits<std::int64_t>::max(),
          std::numeric_limits<std::int64_t>::min()}) {
      auto indices = random_indices(64, 100, own_seed(at, 5));
      indices[40] = index;
      EXPECT_EQ(mine.gather(indices, how), 0u) << "the others come, and its place is untouched";
      EXPECT_THAT(thrown_by([&] { mine.table().check(mine.stream()); }),
                  HasSubstr("index " + std::to_string(index) + " at place 40: there are 100 rows"));
      EXPECT_EQ(thrown_by([&] { mine.table().check(mine.stream()); }), "") << "it is said once";
    }
  }
  mine.meet();
  table_rank checking(at, {.rows = 100, .row_bytes = 128, .check_indices = true}, 64);
  checking.fill(6);
  EXPECT_EQ(checking.gather(random_indices(64, 100, 1)), 0u);
  EXPECT_THAT(thrown_by([&] { checking.gather({1, 2, 100}); }), HasSubstr("index 100 at place 2"));
  EXPECT_THAT(thrown_by([&] { checking.scatter({1, -3}, 7); }), HasSubstr("index -3 at place 1"));
  checking.meet();
}

void the_cache_hits_what_was_gathered_before(const rank_context& at) {
  // Room for all: what is not kept is lost to sets that are full.
  table_rank mine(at, {.rows = 4000, .row_bytes = 272, .cache_rows = 2000}, 500);
  mine.fill(7);
  const auto indices = random_indices(500, 4000, own_seed(at, 6));
  for (const auto& how : {k_as_given, k_by_address}) {
    mine.table().invalidate(0, 4000, mine.stream());
    const auto before = mine.table().statistics(mine.stream());
    EXPECT_EQ(mine.gather(indices, how), 0u);
    const auto first = mine.table().statistics(mine.stream());
    EXPECT_EQ(first.hits, before.hits) << "nothing was cached";
    EXPECT_EQ(mine.gather(indices, how), 0u) << "from the cache";
    const auto second = mine.table().statistics(mine.stream());
    EXPECT_EQ(second.gathered, first.gathered + 500);
    EXPECT_GT(second.hits, first.hits + 450);
    EXPECT_LT(second.fetched, first.fetched + 50);
  }
  EXPECT_GT(mine.table().statistics(mine.stream()).hit_rate(), 0.4);
  // What is wanted in every batch stays, however many other rows come by.
  const auto hot = random_indices(100, 4000, own_seed(at, 7));
  mine.gather(hot);
  for (std::uint64_t round = 0; round < 20; ++round) {
    auto all = random_indices(400, 4000, own_seed(at, 8 + round));
    all.insert(all.end(), hot.begin(), hot.end());
    const auto before = mine.table().statistics(mine.stream());
    EXPECT_EQ(mine.gather(all, k_by_address), 0u);
    EXPECT_GE(mine.table().statistics(mine.stream()).hits, before.hits + 95);
  }
  mine.meet();
}

void what_is_written_leaves_all_caches(const rank_context& at) {
  const int ranks = at.ranks->size();
  table_rank mine(at, {.rows = 800, .row_bytes = 128, .cache_rows = 800}, 400);
  mine.fill(8);
  const auto indices = random_indices(400, 800, 9);  // the same on all ranks
  EXPECT_EQ(mine.gather(indices), 0u);
  mine.meet();
  for (int writer = 0; writer < ranks; ++writer) {
    const auto version = static_cast<std::uint32_t>(20 + writer);
    const auto changed = random_indices(50, 800, version);
    std::vector<std::byte> rows;
    if (mine.me() == writer) {
      mine.scatter(changed, version);
      mine.written({700, 701, 702}, version);
      for (std::size_t i = 700; i < 703; ++i) {
        const auto one = mine.row(i);
        rows.insert(rows.end(), one.begin(), one.end());
      }
      mine.table().write(700, rows, mine.stream());
    } else {
      mine.written(changed, version);
      mine.written({700, 701, 702}, version);
    }
    mine.meet();
    const auto before = mine.table().statistics(mine.stream());
    EXPECT_EQ(mine.gather(indices), 0u) << "no old row";
    EXPECT_GT(mine.table().statistics(mine.stream()).hits, before.hits + 200)
        << "other rows are cached still";
    EXPECT_EQ(mine.gather({700, 701, 702}, k_by_address), 0u);
    mine.meet();
  }
}

void a_write_that_fails_half_way_leaves_no_old_row_cached(const rank_context& outer) {
  if (outer.ranks->size() == 1) return;  // one rank's rows are one copy
  constexpr std::int64_t border = 240;
  rank_context at = outer;
  const auto faulty = fault_driver::make(outer.on);
  at.on = faulty;
  const std::size_t rows_of_all = border * static_cast<std::size_t>(at.ranks->size());
  table_rank mine(at, {.rows = rows_of_all, .row_bytes = 128, .cache_rows = 240}, 400);
  mine.fill(30);
  const std::vector<std::int64_t> copied{border - 2, border - 1};
  const std::vector<std::int64_t> indices{border - 2, border - 1, border, border + 1};
  EXPECT_EQ(mine.gather(indices), 0u);
  mine.meet();
  std::vector<std::byte> rows;  // until they are copied
  if (mine.me() == 0) {
    for (const std::int64_t i : indices) {
      const auto one = mine.row(static_cast<std::size_t>(i), 31);
      rows.insert(rows.end(), one.begin(), one.end());
    }
    faulty->fail_call(driver_call::copy, 1);
    EXPECT_THROW(mine.table().write(static_cast<std::size_t>(border - 2), rows, mine.stream()),
                 error);
    EXPECT_TRUE(faulty->disarm());
  }
  mine.written(copied, 31);
  mine.meet();
  EXPECT_EQ(mine.gather(indices), 0u) << "half new, half old";
  mine.meet();
}

void streams_order_writes_and_gathers(const rank_context& at) {
  table_rank mine(at, {.rows = 640, .row_bytes = 256, .cache_rows = 64}, 640);
  symmetric_channel channel(mine.heap().region());
  const auto ranks = static_cast<std::size_t>(at.ranks->size());
  const std::size_t each = 640 / ranks;
  std::vector<std::int64_t> all(640);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::int64_t>(i);
  const auto indices = mine.upload(all);
  std::vector<std::byte> rows;
  for (std::uint32_t version = 1; version < 6; ++version) {
    // The rank after this one writes this one's rows; no CPU waits in between.
    const std::size_t first = (static_cast<std::size_t>(mine.me()) + 1) % ranks * each;
    mine.written(all, version);
    rows.clear();
    for (std::size_t i = first; i < first + each; ++i) {
      const auto one = mine.row(i);
      rows.insert(rows.end(), one.begin(), one.end());
    }
    mine.table().write(first, rows, mine.stream());
    channel.barrier(mine.stream());
    mine.table().gather(indices.first(ranks * each), mine.out(), mine.stream(), k_by_address);
    channel.barrier(mine.stream());
    EXPECT_EQ(mine.wrong({all.begin(), all.begin() + static_cast<long>(ranks * each)}), 0u);
    channel.check();
  }
  mine.meet();
  channel.close();
}

void an_issued_gather_is_waited_for_by_any_stream(const rank_context& at) {
  table_rank mine(at, {.rows = 900, .row_bytes = 512}, 600);
  mine.fill(10);
  const native_stream other = at.on->create_stream(at.device);
  const auto indices = random_indices(600, 900, own_seed(at, 10));
  const auto uploaded = mine.upload(indices);
  mine.clear(600);
  const std::size_t half = 300 * 512;
  {
    // Work before it on the stream is waited for: the output is cleared there.
    const auto first = mine.table().issue_gather(uploaded.first(300), mine.out(), mine.stream());
    auto second = mine.table().issue_gather(uploaded.subspan(300), mine.out() + half, mine.stream(),
                                            k_by_address);
    // On a stream of the caller's own meanwhile: the scratch is shared.
    mine.table().gather(uploaded.first(10), mine.out(), other, k_by_address);
    first.wait(other);
    second.wait(other);
    second.wait(mine.stream());
    at.on->synchronize(other);
    EXPECT_TRUE(first.done());
    EXPECT_TRUE(second.done());
    second = mine.table().issue_gather({}, nullptr, mine.stream());
    second.wait(other);
    at.on->synchronize(other);
    EXPECT_TRUE(second.done());
  }
  EXPECT_EQ(mine.wrong(indices), 0u);
  at.on->destroy_stream(other);
  mine.meet();
}

void a_captured_gather_is_replayed(const rank_context& at) {
  table_rank mine(at, {.rows = 2000, .row_bytes = 128, .cache_rows = 256}, 512);
  mine.fill(11);
  auto indices = random_indices(512, 2000, own_seed(at, 11), 4);
  EXPECT_EQ(mine.gather(indices, k_by_address), 0u);
  const auto uploaded = mine.upload(indices);
  mine.clear(512);
  at.on->synchronize(mine.stream());
  scoped_capture capture(*at.on, mine.stream());
  mine.table().gather(uploaded.first(256), mine.out(), mine.stream(), k_by_address);
  const auto issued = mine.table().issue_gather(
      uploaded.subspan(256), mine.out() + std::size_t{256} * 128, mine.stream(), k_by_address);
  issued.wait(mine.stream());
  capture.end();
  for (std::uint64_t round = 0; round < 5; ++round) {
    indices = random_indices(512, 2000, own_seed(at, 12 + round), 4, 9);
    mine.upload(indices);
    mine.clear(512);
    capture.launch(mine.stream());
    EXPECT_EQ(mine.wrong(indices), 0u) << "launch " << round;
  }
  const auto counted = mine.table().statistics(mine.stream());
  EXPECT_EQ(counted.gathered, 6u * 512);
  EXPECT_GT(counted.hits, 0u);
  EXPECT_EQ(mine.gather(indices, k_by_address), 0u) << "outside of the graph again";
  mine.meet();

  table_rank checking(at, {.rows = 10, .row_bytes = 128, .check_indices = true}, 8);
  checking.fill(1);
  const auto few = checking.upload({1, 2, 3});
  {
    scoped_capture refused(*at.on, checking.stream());
    EXPECT_THAT(thrown_by([&] { checking.table().gather(few, checking.out(), checking.stream()); }),
                HasSubstr("check_indices waits for each gather"));
    EXPECT_THAT(thrown_by([&] {
                  (void)checking.table().issue_gather(few, checking.out(), checking.stream());
                }),
                HasSubstr("check_indices waits for each gather"));
    refused.end();
  }
  checking.meet();
}

void wrong_calls_are_refused(const rank_context& at) {
  const auto refused = [&](const ep::table_options& options, const std::string& why) {
    symmetric_heap heap(at.make());
    EXPECT_THAT(thrown_by([&] { ep::table(heap, options); }), HasSubstr(why));
    heap.close();
  };
  refused({.row_bytes = 256}, "rows is 0");
  refused({.rows = 10}, "row_bytes is 0");
  refused({.rows = 10, .row_bytes = 120}, "row_bytes is 120");
  refused({.rows = 10, .row_bytes = 136}, "row_bytes is 136");
  refused({.rows = 10, .row_bytes = 16400}, "row_bytes is 16400");
  refused({.rows = std::size_t{1} << 32, .row_bytes = 128}, "rows is 4294967296");
  refused({.rows = 10, .row_bytes = 128, .device_rows = 3}, "device_rows is 3 with host_only");
  refused({.rows = 10, .row_bytes = 128, .max_batch = 0}, "max_batch is 0");
  if (at.ranks->size() > 1) {
    const auto rank = static_cast<std::size_t>(at.ranks->rank().value);
    refused({.rows = 10 + rank, .row_bytes = 128}, "rank 0 and rank 1 gave different options");
  }

  table_rank mine(at, {.rows = 10, .row_bytes = 128}, 10);
  mine.fill(1);
  auto& table = mine.table();
  const auto indices = mine.upload({1, 2, 3});
  const std::vector<std::byte> rows(std::size_t{3} * 128);
  const auto says = [&](const char* why, const std::function<void()>& call) {
    EXPECT_THAT(thrown_by(call), HasSubstr(why));
  };
  says("cannot gather into", [&] { table.gather(indices, mine.out() + 8, mine.stream()); });
  says("cannot gather into", [&] { table.gather(indices, nullptr, mine.stream()); });
  says("cannot gather with -1 multi",
       [&] { table.gather(indices, mine.out(), mine.stream(), {.sms = -1}); });
  says("cannot write 100 bytes",
       [&] { table.write(0, std::span{rows}.first(100), mine.stream()); });
  says("cannot write rows 8 to 11: there are 10", [&] { table.write(8, rows, mine.stream()); });
  says("cannot scatter from", [&] { table.scatter(indices, nullptr, mine.stream()); });
  EXPECT_EQ(mine.gather({9, 8, 7}), 0u) << "nothing was done";
  mine.meet();
}

void what_does_not_fit_leaves_the_heap_as_it_was(const rank_context& at) {
  symmetric_heap heap(at.make({.reserve = 256_MiB}),
                      {.growth_step = 2_MiB, .device_limit = 16_MiB, .host_limit = 16_MiB});
  const auto ranks = static_cast<std::size_t>(at.ranks->size());
  const auto refused = [&](const ep::table_options& options) {
    EXPECT_THROW(ep::table(heap, options), error);
    EXPECT_EQ(heap.report().allocated_bytes, 0u);
    heap.check_invariants();
  };
  refused({.rows = ranks * 32_MiB / 1024, .row_bytes = 1024});
  refused({.rows = ranks * 8_MiB / 1024, .row_bytes = 1024, .cache_rows = 32_MiB / 1024});
  refused({.rows = ranks * 512_MiB / 1024,
           .row_bytes = 1024,
           .tiers = tier_policy::device_first,
           .device_rows = 4_MiB / 1024});
  // What these took is free for another, in whichever pool it was.
  {
    ep::table fits(heap, {.rows = ranks * 12_MiB / 1024,
                          .row_bytes = 1024,
                          .tiers = tier_policy::device_first,
                          .max_batch = 1024});
    EXPECT_GT(heap.report().allocated_bytes, 12_MiB);
  }
  EXPECT_EQ(heap.report().allocated_bytes, 0u);
  heap.close();
}

void a_table_ends_when_its_writes_have(const rank_context& at) {
  const auto ranks = static_cast<std::size_t>(at.ranks->size());
  const auto me = static_cast<std::size_t>(at.ranks->rank().value);
  symmetric_heap heap(at.make({.reserve = 256_MiB}), {.growth_step = 2_MiB});
  const native_stream first = at.on->create_stream(at.device);
  const native_stream second = at.on->create_stream(at.device);
  symmetric_buffer<std::byte> from(heap, 16_KiB);
  const std::span<const std::byte> rows = from.elements();
  std::optional<ep::table> made(std::in_place, heap,
                                ep::table_options{.rows = ranks * 128, .row_bytes = 128});
  {
    stream_gate gate(*at.on, first);
    made->write(me * 128, rows, first);
    made->write(me * 128, rows.first(128), second);
    const auto gone = std::async(std::launch::async, [&] { made.reset(); });
    EXPECT_EQ(gone.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout)
        << "its memory is written still";
    gate.open();
  }
  at.on->destroy_stream(first);
  at.on->destroy_stream(second);
  at.ranks->barrier("the tables are gone");
}

void random_tables_are_exact(const rank_context& at) {
  run_random_tables(at, 6, 13);
}

}  // namespace

void run_random_tables(const rank_context& at, std::size_t count, std::uint64_t seed) {
  std::mt19937_64 same(seed);
  std::mt19937_64 own(own_seed(at, seed));
  for (std::size_t round = 0; round < count; ++round) {
    const std::size_t rows = 1 + same() % 3000;
    table_rank mine(at,
                    {.rows = rows,
                     .row_bytes = 128 + 16 * (same() % 64),
                     .tiers = static_cast<tier_policy>(same() % 4),
                     .cache_rows = same() % 2 == 0 ? 0 : 1 + same() % 500,
                     .max_batch = 1 + same() % 900},
                    1000);
    mine.fill(1);
    for (std::uint32_t version = 2; version < 5; ++version) {
      for (int turn = 0; turn < 3; ++turn) {
        const ep::gather_options how{.order = static_cast<ep::gather_order>(own() % 3),
                                     .sms = static_cast<int>(own() % 4)};
        EXPECT_EQ(
            mine.gather(random_indices(own() % 1001, rows, own(), static_cast<unsigned>(own() % 4),
                                       static_cast<unsigned>(own() % 6)),
                        how),
            0u);
      }
      mine.meet();
      const int writer = static_cast<int>(same() % static_cast<std::uint64_t>(at.ranks->size()));
      const auto changed = random_indices(same() % 100, rows, same());
      if (mine.me() == writer) {
        mine.scatter(changed, version);
      } else {
        mine.written(changed, version);
      }
      mine.meet();
    }
    mine.table().check(mine.stream());
    mine.meet();
  }
}

const std::vector<symmetric_case>& table_cases() {
#define EVMM_CASE(name) \
  { #name, &name }
  static const std::vector<symmetric_case> all = {
      EVMM_CASE(rows_of_all_ranks_arrive),
      EVMM_CASE(the_last_rank_may_have_no_rows),
      EVMM_CASE(rows_lie_in_the_tiers_asked_for),
      EVMM_CASE(duplicates_are_loaded_once),
      EVMM_CASE(a_gather_of_more_than_a_batch_is_done_in_parts),
      EVMM_CASE(wrong_indices_touch_nothing_and_are_named),
      EVMM_CASE(the_cache_hits_what_was_gathered_before),
      EVMM_CASE(what_is_written_leaves_all_caches),
      EVMM_CASE(a_write_that_fails_half_way_leaves_no_old_row_cached),
      EVMM_CASE(streams_order_writes_and_gathers),
      EVMM_CASE(an_issued_gather_is_waited_for_by_any_stream),
      EVMM_CASE(a_captured_gather_is_replayed),
      EVMM_CASE(wrong_calls_are_refused),
      EVMM_CASE(what_does_not_fit_leaves_the_heap_as_it_was),
      EVMM_CASE(a_table_ends_when_its_writes_have),
      EVMM_CASE(random_tables_are_exact),
  };
#undef EVMM_CASE
  return all;
}

}  // namespace evmm::test
