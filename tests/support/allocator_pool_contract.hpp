// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/allocator_contract.hpp"

#include <algorithm>
#include <atomic>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>

// Pools: where requests go, what pools share, and when they end.

namespace evmm::test {

class allocator_pool_contract : public allocator_contract {
 protected:
  void* allocate_in(pool_id pool, std::size_t bytes, native_stream stream = nullptr) {
    allocator->begin_allocate_to_pool(pool);
    void* const made = allocator->allocate(bytes, stream);
    allocator->end_allocate_to_pool(pool);
    return made;
  }
  bool lives_in(pool_id pool, void* block) const {
    const auto found = allocator->snapshot(pool, false);
    return std::any_of(found.segments.begin(), found.segments.end(), [&](const auto& segment) {
      return at(block) >= segment.at && at(block) < segment.at + segment.total_bytes;
    });
  }
};

/// A user's functions: memory of an allocator of their own, counted.
class user_memory {
 public:
  explicit user_memory(std::shared_ptr<driver> on)
      : source_(std::move(on), device_id{0}, parse_options("expandable_segments:False")) {}
  pool_functions functions() {
    return {.allocate = [this](std::size_t bytes, device_id device, native_stream stream) -> void* {
              EXPECT_EQ(device.value, 0);
              if (fails) return nullptr;
              if (throws) throw std::runtime_error("the user's allocate");
              void* const made = source_.allocate(bytes, stream);
              given[made] = bytes;
              return made;
            },
            .free =
                [this](void* at, std::size_t bytes, device_id) {
                  EXPECT_EQ(given.count(at), 1u) << "given, and not yet taken back";
                  EXPECT_EQ(given[at], bytes);
                  given.erase(at);
                  source_.free(at);
                }};
  }
  std::map<void*, std::size_t> given;
  bool fails = false;
  bool throws = false;

 private:
  caching_allocator source_;
};

TEST_P(allocator_pool_contract, pools_share_no_blocks) {
  make(k_segments);
  const pool_id pool = allocator->create_pool();
  void* const inside = allocate_in(pool, 3_MiB);
  void* const outside = allocator->allocate(3_MiB);
  EXPECT_TRUE(lives_in(pool, inside));
  EXPECT_FALSE(lives_in(pool, outside));
  allocator->free(inside);
  EXPECT_NE(allocator->base_allocation(outside).base, inside);
  EXPECT_EQ(allocate_in(pool, 3_MiB), inside);
  free({inside, outside});
}

TEST_P(allocator_pool_contract, the_route_begun_last_is_asked_first) {
  make();
  const pool_id outer = allocator->create_pool();
  const pool_id inner = allocator->create_pool();
  allocator->begin_allocate_to_pool(outer);
  allocator->begin_allocate_to_pool(inner);
  void* const a = allocator->allocate(3_MiB);
  allocator->end_allocate_to_pool(inner);
  void* const b = allocator->allocate(3_MiB);
  allocator->end_allocate_to_pool(outer);
  void* const c = allocator->allocate(3_MiB);
  EXPECT_TRUE(lives_in(inner, a));
  EXPECT_TRUE(lives_in(outer, b));
  EXPECT_TRUE(lives_in(pool_id{}, c));
  free({a, b, c});
}

TEST_P(allocator_pool_contract, routes_may_end_in_any_order) {
  make();
  const pool_id first = allocator->create_pool();
  const pool_id second = allocator->create_pool();
  allocator->begin_allocate_to_pool(first);
  allocator->begin_allocate_to_pool(second);
  allocator->begin_allocate_to_pool(first);
  allocator->end_allocate_to_pool(first);  // the later one
  void* const a = allocator->allocate(3_MiB);
  EXPECT_TRUE(lives_in(second, a));
  allocator->end_allocate_to_pool(first);
  void* const b = allocator->allocate(3_MiB);
  EXPECT_TRUE(lives_in(second, b));
  allocator->end_allocate_to_pool(second);
  EXPECT_TRUE(
      says(refusal([&] { allocator->end_allocate_to_pool(second); }), "begin_allocate_to_pool"));
  free({a, b});
}

TEST_P(allocator_pool_contract, filters_choose_by_stream) {
  make();
  const native_stream chosen = new_stream();
  const pool_id pool = allocator->create_pool();
  allocator->begin_allocate_to_pool(pool, [&](native_stream stream) { return stream == chosen; });
  void* const a = allocator->allocate(3_MiB, chosen);
  void* const b = allocator->allocate(3_MiB);
  allocator->end_allocate_to_pool(pool);
  void* const c = allocator->allocate(3_MiB, chosen);
  EXPECT_TRUE(lives_in(pool, a));
  EXPECT_FALSE(lives_in(pool, b));
  EXPECT_FALSE(lives_in(pool, c));
  free({a, b, c});
}

TEST_P(allocator_pool_contract, filters_are_asked_at_each_allocation) {
  make();
  bool open = false;
  const pool_id pool = allocator->create_pool();
  allocator->begin_allocate_to_pool(pool, [&](native_stream) { return open; });
  void* const a = allocator->allocate(3_MiB);
  open = true;
  void* const b = allocator->allocate(3_MiB);
  open = false;
  void* const c = allocator->allocate(3_MiB);
  allocator->end_allocate_to_pool(pool);
  EXPECT_TRUE(allocator->live_allocations_are(pool, {b}));
  free({a, b, c});
}

TEST_P(allocator_pool_contract, a_route_without_filter_is_the_threads_own) {
  make();
  const pool_id pool = allocator->create_pool();
  allocator->begin_allocate_to_pool(pool);
  void* elsewhere = nullptr;
  std::thread([&] { elsewhere = allocator->allocate(3_MiB); }).join();
  void* const here = allocator->allocate(3_MiB);
  allocator->end_allocate_to_pool(pool);
  EXPECT_TRUE(allocator->live_allocations_are(pool, {here}));
  free({here, elsewhere});
}

TEST_P(allocator_pool_contract, threads_that_go_to_one_pool_end_their_own_routes) {
  make();
  const pool_id pool = allocator->create_pool();
  allocator->begin_allocate_to_pool(pool);
  std::thread([&] {
    allocator->begin_allocate_to_pool(pool);
    allocator->begin_allocate_to_pool(pool);
    allocator->end_allocate_to_pool(pool);
  }).join();
  allocator->end_allocate_to_pool(pool);
  void* const outside = allocator->allocate(3_MiB);
  EXPECT_FALSE(lives_in(pool, outside));
  allocator->end_allocate_to_pool(pool);  // of the thread that has ended
  EXPECT_THROW(allocator->end_allocate_to_pool(pool), invalid_argument);
  allocator->free(outside);
}

TEST_P(allocator_pool_contract, live_allocations_are_told_exactly) {
  make();
  const pool_id pool = allocator->create_pool();
  EXPECT_TRUE(allocator->live_allocations_are(pool, {}));
  void* const a = allocate_in(pool, 3_MiB);
  void* const b = allocate_in(pool, 512);
  EXPECT_TRUE(allocator->live_allocations_are(pool, {b, a}));
  EXPECT_FALSE(allocator->live_allocations_are(pool, {a}));
  EXPECT_FALSE(allocator->live_allocations_are(pool, {a, b, this}));
  allocator->free(a);
  EXPECT_TRUE(allocator->live_allocations_are(pool, {b}));
  allocator->free(b);
}

TEST_P(allocator_pool_contract, no_split_hands_out_free_blocks_whole) {
  make(k_segments);
  const pool_id pool = allocator->create_pool({.no_split = true});
  void* const big = allocate_in(pool, 16_MiB);
  allocator->free(big);
  void* const part = allocate_in(pool, 3_MiB);
  EXPECT_EQ(part, big);
  EXPECT_EQ(block_bytes(part), 16_MiB);
  void* const small = allocate_in(pool, 512);
  EXPECT_EQ(block_bytes(small), 2_MiB);
  free({part, small});
  allocator->begin_allocate_to_pool(pool);
  EXPECT_EQ(allocator->allocate_at(static_cast<std::byte*>(big) + 1_MiB, 3_MiB), nullptr);
  EXPECT_EQ(allocator->allocate_at(big, 3_MiB), big);
  allocator->end_allocate_to_pool(pool);
  EXPECT_EQ(block_bytes(big), 16_MiB);
  allocator->free(big);
}

TEST_P(allocator_pool_contract, no_split_holds_where_segments_expand) {
  make();
  const pool_id pool = allocator->create_pool({.no_split = true});
  void* const big = allocate_in(pool, 16_MiB);
  allocator->free(big);
  void* const part = allocate_in(pool, 3_MiB);
  EXPECT_EQ(part, big);
  EXPECT_EQ(block_bytes(part), 16_MiB);
  allocator->free(part);
}

TEST_P(allocator_pool_contract, a_pool_may_choose_whether_its_segments_expand) {
  make();
  const pool_id fixed = allocator->create_pool({.expandable_segments = false});
  void* const a = allocate_in(fixed, 12_MiB);
  EXPECT_TRUE(allocator->expandable_sizes().empty());
  EXPECT_FALSE(allocator->snapshot(fixed, false).segments.at(0).expandable);
  allocator->free(a);
  make(k_segments);
  const pool_id expanding = allocator->create_pool({.expandable_segments = true});
  void* const b = allocate_in(expanding, 12_MiB);
  EXPECT_EQ(allocator->expandable_sizes().at(0).pool, expanding);
  allocator->free(b);
}

TEST_P(allocator_pool_contract, memory_may_come_from_the_user) {
  user_memory user(on);
  make();
  const pool_id pool = allocator->create_pool({.functions = user.functions()});
  void* const large = allocate_in(pool, 12_MiB);
  void* const small = allocate_in(pool, 600);
  EXPECT_EQ(user.given.size(), 2u);
  EXPECT_EQ(user.given.count(large), 1u);
  write(large, 12_MiB, 8);
  EXPECT_TRUE(holds(large, 12_MiB, 8));
  free({large, small});
  EXPECT_EQ(allocate_in(pool, 12_MiB), large) << "cached";
  allocator->free(large);
  EXPECT_EQ(user.given.size(), 2u);
  EXPECT_EQ(allocator->empty_cache(pool), 14_MiB);
  EXPECT_TRUE(user.given.empty());
  void* const again = allocate_in(pool, 12_MiB);
  EXPECT_EQ(user.given.size(), 1u);
  allocator->free(again);
  allocator.reset();
  EXPECT_TRUE(user.given.empty()) << "at the end too";
}

TEST_P(allocator_pool_contract, a_user_without_memory_is_out_of_memory) {
  user_memory user(on);
  make();
  const pool_id pool = allocator->create_pool({.functions = user.functions()});
  user.fails = true;
  allocator->begin_allocate_to_pool(pool);
  const std::string said = refusal([&] { (void)allocator->allocate(12_MiB); });
  EXPECT_TRUE(says(said, "pool 1") && says(said, "own `allocate` returned null")) << said;
  user.fails = false;
  user.throws = true;
  EXPECT_THROW((void)allocator->allocate(12_MiB), std::runtime_error);
  user.throws = false;
  void* const block = allocator->allocate(12_MiB);
  allocator->end_allocate_to_pool(pool);
  EXPECT_EQ(user.given.size(), 1u);
  allocator->free(block);
  allocator.reset();
}

TEST_P(allocator_pool_contract, memory_of_the_user_is_checked) {
  make();
  pool_functions functions;
  std::vector<address> taken_back;
  address returns = 0;
  functions.allocate = [&](std::size_t, device_id, native_stream) {
    return reinterpret_cast<void*>(returns);
  };
  functions.free = [&](void* back, std::size_t, device_id) { taken_back.push_back(at(back)); };
  const pool_id pool = allocator->create_pool({.functions = functions});
  returns = (address{1} << 40) + 256;
  EXPECT_TRUE(says(refusal([&] { (void)allocate_in(pool, 1000); }), "no multiple of 512"));
  allocator->end_allocate_to_pool(pool);
  EXPECT_EQ(taken_back, std::vector<address>{returns});
  returns = address{1} << 40;
  void* const block = allocate_in(pool, 1000);
  returns += 1_MiB;
  EXPECT_TRUE(says(refusal([&] { (void)allocate_in(pool, 3_MiB); }), "held already"));
  allocator->end_allocate_to_pool(pool);
  returns -= 2_MiB;
  EXPECT_TRUE(says(refusal([&] { (void)allocate_in(pool, 9_MiB); }), "held already"))
      << "all around what is held";
  allocator->end_allocate_to_pool(pool);
  EXPECT_EQ(taken_back.size(), 1u) << "it is in use";
  allocator->free(block);
  allocator.reset();
}

TEST_P(allocator_pool_contract, what_the_user_gives_is_no_matter_of_the_devices_memory) {
  user_memory user(on);
  make("throw_on_cudamalloc_oom:True");
  const pool_id pool = allocator->create_pool({.functions = user.functions()});
  allocator->set_memory_fraction(0);
  allocator->free(allocate_in(pool, 12_MiB));
  allocator.reset();
}

TEST_P(allocator_pool_contract, users_are_counted) {
  make();
  const pool_id pool = allocator->create_pool();
  EXPECT_EQ(allocator->pool_use_count(pool), 1);
  allocator->retain_pool(pool);
  EXPECT_EQ(allocator->pool_use_count(pool), 2);
  void* const block = allocate_in(pool, 3_MiB);
  allocator->release_pool(pool);
  EXPECT_EQ(allocator->pool_use_count(pool), 1);
  allocator->free(block);
  EXPECT_GT(reserved(), 0) << "still cached for its user";
  allocator->release_pool(pool);
  EXPECT_EQ(reserved(), 0) << "given back with the last one";
  EXPECT_TRUE(says(refusal([&] { (void)allocator->pool_use_count(pool); }), "no pool 1"));
}

TEST_P(allocator_pool_contract, a_released_pool_lives_as_long_as_its_blocks) {
  for (const char* const config : {"", k_segments}) {
    make(config);
    const pool_id pool = allocator->create_pool();
    void* const a = allocate_in(pool, 3_MiB);
    void* const b = allocate_in(pool, 3_MiB);
    write(a, 3_MiB, 1);
    allocator->free(b);
    allocator->release_pool(pool);
    EXPECT_TRUE(holds(a, 3_MiB, 1));
    EXPECT_EQ(allocator->pool_use_count(pool), 0);
    EXPECT_TRUE(says(refusal([&] { allocator->retain_pool(pool); }), "was released"));
    EXPECT_TRUE(says(refusal([&] { allocator->release_pool(pool); }), "no user"));
    allocator->free(a);
    allocator->empty_cache();
    EXPECT_EQ(reserved(), 0);
    EXPECT_TRUE(says(refusal([&] { (void)allocator->snapshot(pool); }), "no pool 1"));
  }
}

TEST_P(allocator_pool_contract, a_released_pool_lives_as_long_as_its_routes) {
  make();
  const pool_id pool = allocator->create_pool();
  allocator->begin_allocate_to_pool(pool);
  allocator->release_pool(pool);
  void* const block = allocator->allocate(3_MiB);
  EXPECT_TRUE(lives_in(pool, block));
  allocator->end_allocate_to_pool(pool);
  allocator->free(block);
  allocator->empty_cache();
  EXPECT_EQ(reserved(), 0);
  EXPECT_EQ(refusal([&] { free({allocator->allocate(3_MiB)}); }), "done");
}

TEST_P(allocator_pool_contract, a_pool_may_go_while_threads_are_sent_there) {
  for (const char* const config : {"", k_segments}) {
    make(config);
    std::atomic<bool> over = false;
    std::atomic<int> served = 0;
    std::string refused = "done";
    std::thread other([&] {
      for (; !over && refused == "done"; ++served) {
        refused = refusal([&] { free({allocator->allocate(1000), allocator->allocate(3_MiB)}); });
      }
      over = true;
    });
    for (int i = 0; i < 100 && !over; ++i) {
      const pool_id pool = allocator->create_pool();
      allocator->begin_allocate_to_pool(pool, [](native_stream) { return true; });
      for (const int before = served; served == before && !over;) std::this_thread::yield();
      allocator->end_allocate_to_pool(pool);
      allocator->release_pool(pool);
    }
    over = true;
    other.join();
    EXPECT_EQ(refused, "done") << "it goes where it would go now";
    allocator->empty_cache();
    EXPECT_EQ(reserved(), 0);
    allocator->check_invariants();
  }
}

TEST_P(allocator_pool_contract, totals_outlive_a_pool) {
  make();
  const pool_id pool = allocator->create_pool();
  allocator->free(allocate_in(pool, 3_MiB));
  allocator->release_pool(pool);
  const auto now = allocator->statistics();
  EXPECT_EQ(now.allocation.all, (statistic{.current = 0, .peak = 1, .allocated = 1, .freed = 1}));
  EXPECT_EQ(now.reserved_bytes.all.freed, now.reserved_bytes.all.allocated);
}

TEST_P(allocator_pool_contract, empty_cache_may_name_one_pool) {
  make(k_segments);
  const pool_id pool = allocator->create_pool();
  allocator->free(allocate_in(pool, 12_MiB));
  free({allocator->allocate(14_MiB)});
  EXPECT_EQ(allocator->empty_cache(pool), 12_MiB);
  EXPECT_EQ(reserved(), 14 << 20);
  EXPECT_EQ(allocator->empty_cache(pool_id{}), 14_MiB);
}

TEST_P(allocator_pool_contract, pools_that_are_not_there_are_named) {
  make();
  const pool_id none{42};
  for (const std::function<void()>& call : std::vector<std::function<void()>>{
           [&] { allocator->retain_pool(none); }, [&] { allocator->release_pool(none); },
           [&] { (void)allocator->pool_use_count(none); },
           [&] { allocator->begin_allocate_to_pool(none); },
           [&] { allocator->end_allocate_to_pool(none); },
           [&] { (void)allocator->live_allocations_are(none, {}); },
           [&] { allocator->begin_capture(none); }, [&] { allocator->end_capture(none); },
           [&] { (void)allocator->checkpoint(none); }, [&] { (void)allocator->statistics(none); },
           [&] { (void)allocator->snapshot(none); }, [&] { allocator->empty_cache(none); }}) {
    const std::string said = refusal(call);
    EXPECT_TRUE(says(said, "invalid_argument") && says(said, "pool 42")) << said;
  }
  EXPECT_TRUE(says(refusal([&] { allocator->release_pool(pool_id{}); }), "pool 0"));
}

TEST_P(allocator_pool_contract, options_of_a_pool_are_checked) {
  make();
  EXPECT_TRUE(says(refusal([&] { allocator->create_pool({.tiers = {}}); }), "tiers"));
  EXPECT_TRUE(says(refusal([&] {
                     allocator->create_pool({.tiers = {tier::host, tier::host}});
                   }),
                   "tiers"));
  EXPECT_TRUE(says(refusal([&] {
                     allocator->create_pool(
                         {.functions = pool_functions{.allocate = {}, .free = {}}});
                   }),
                   "pool_functions"));
}

TEST_P(allocator_pool_contract, a_snapshot_shows_one_pool) {
  make();
  const pool_id pool = allocator->create_pool();
  void* const inside = allocate_in(pool, 3_MiB);
  void* const outside = allocator->allocate(3_MiB);
  const auto one = allocator->snapshot(pool, false);
  ASSERT_EQ(one.segments.size(), 1u);
  EXPECT_EQ(one.segments[0].pool.first + one.segments[0].pool.second, 1u);
  EXPECT_EQ(one.segments[0].allocated_bytes, 3_MiB);
  EXPECT_EQ(allocator->snapshot({}, false).segments.size(), 2u);
  EXPECT_EQ(allocator->snapshot(pool_id{}, false).segments.at(0).pool, (pool_number{0, 0}));
  free({inside, outside});
}

TEST_P(allocator_pool_contract, helpers_serve_the_default_pool_alone) {
  make("expandable_segments:False,recycle_handles:never");
  allow(20_MiB);
  const pool_id helper = allocator->create_pool({.use_on_oom = true});
  const pool_id other = allocator->create_pool();
  allocator->free(allocate_in(helper, 20_MiB));
  void* const block = allocate_in(other, 20_MiB);
  EXPECT_TRUE(lives_in(other, block)) << "the helper's memory was given back, not handed out";
  EXPECT_TRUE(allocator->live_allocations_are(helper, {}));
  allocator->free(block);
}

}  // namespace evmm::test
