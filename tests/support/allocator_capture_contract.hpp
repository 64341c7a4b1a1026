// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/allocator_contract.hpp"
#include "tests/support/driver_contract.hpp"
#include "tests/support/scoped_capture.hpp"

#include <algorithm>

// Graph captures that allocate from a private pool.

namespace evmm::test {

class allocator_capture_contract : public allocator_contract {
 protected:
  /// A capture on a stream whose thread allocates from the pool meanwhile.
  class capture {
   public:
    capture(allocator_capture_contract& self, pool_id pool, native_stream stream)
        : self_(self), pool_(pool) {
      self_.allocator->begin_allocate_to_pool(pool_);
      self_.allocator->begin_capture(pool_);
      graph_.emplace(*self_.on, stream);
    }
    ~capture() {
      if (!ended_) graph_.reset();
      if (!ended_) over();
    }
    void end() {
      graph_->end();
      over();
    }
    void launch(native_stream stream) { graph_->launch(stream); }

   private:
    void over() {
      ended_ = true;
      self_.allocator->end_capture(pool_);
      self_.allocator->end_allocate_to_pool(pool_);
    }
    allocator_capture_contract& self_;
    pool_id pool_;
    std::optional<scoped_capture> graph_;
    bool ended_ = false;
  };

  /// Work of `from` so far comes before what `to` does next.
  void join(native_stream from, native_stream to) {
    const scoped_event event(*on);
    on->record(event, from);
    on->wait(to, event);
  }
  bool filled(const void* where, std::byte value, std::size_t bytes, native_stream stream) {
    std::vector<std::byte> found(bytes);
    on->copy(at(found.data()), at(where), bytes, stream);
    on->synchronize(stream);
    return std::count(found.begin(), found.end(), value) == static_cast<std::ptrdiff_t>(bytes);
  }
};

TEST_P(allocator_capture_contract, a_graph_replays_on_memory_of_its_pool) {
  for (const char* const config : {"", k_segments}) {
    make(config);
    const native_stream stream = new_stream();
    const pool_id pool = allocator->create_pool();
    void* block = nullptr;
    {
      capture graph(*this, pool, stream);
      block = allocator->allocate(3_MiB, stream);
      on->fill(at(block), std::byte{9}, 3_MiB, stream);
      allocator->free(block);
      graph.end();
      void* const outside = allocator->allocate(3_MiB, stream);
      EXPECT_NE(outside, block) << "the graph's memory is not for others";
      on->fill(at(outside), std::byte{1}, 3_MiB, stream);
      for (int i = 0; i < 2; ++i) {
        graph.launch(stream);
        EXPECT_TRUE(filled(block, std::byte{9}, 3_MiB, stream));
      }
      EXPECT_TRUE(filled(outside, std::byte{1}, 3_MiB, stream));
      allocator->free(outside);
    }
    EXPECT_EQ(allocator->empty_cache(pool), 0u) << "it can replay as long as the pool has users";
    allocator->release_pool(pool);
    allocator->empty_cache();
    EXPECT_EQ(reserved(), 0);
  }
}

TEST_P(allocator_capture_contract, blocks_of_the_capturing_stream_are_reused_in_the_capture) {
  make();
  const native_stream stream = new_stream();
  const pool_id pool = allocator->create_pool();
  capture graph(*this, pool, stream);
  void* const first = allocator->allocate(3_MiB, stream);
  on->fill(at(first), std::byte{1}, 512, stream);
  allocator->free(first);
  EXPECT_EQ(allocator->allocate(3_MiB, stream), first);
  allocator->free(first);
  graph.end();
}

TEST_P(allocator_capture_contract, blocks_that_other_streams_used_wait_for_its_end) {
  make();
  const native_stream origin = new_stream();
  const native_stream side = new_stream();
  const pool_id pool = allocator->create_pool();
  void* first = nullptr;
  void* second = nullptr;
  {
    capture graph(*this, pool, origin);
    first = allocator->allocate(3_MiB, origin);
    on->fill(at(first), std::byte{1}, 512, origin);
    join(origin, side);
    on->fill(at(first), std::byte{2}, 512, side);
    allocator->record_stream(first, side);
    allocator->free(first);
    join(side, origin);
    second = allocator->allocate(3_MiB, origin);
    EXPECT_NE(second, first) << "reuse within a capture was not asked for";
    on->fill(at(second), std::byte{3}, 512, origin);
    graph.end();
  }
  on->synchronize(origin);
  on->synchronize(side);
  allocator->begin_allocate_to_pool(pool);
  EXPECT_EQ(allocator->allocate(3_MiB, origin), first);
  allocator->end_allocate_to_pool(pool);
  free({first, second});
}

TEST_P(allocator_capture_contract, reuse_in_a_capture_needs_a_proof) {
  make("graph_capture_record_stream_reuse:True");
  const native_stream origin = new_stream();
  const native_stream side = new_stream();
  const pool_id pool = allocator->create_pool();
  capture graph(*this, pool, origin);
  void* const first = allocator->allocate(3_MiB, origin);
  on->fill(at(first), std::byte{1}, 512, origin);
  join(origin, side);
  on->fill(at(first), std::byte{2}, 512, side);
  allocator->record_stream(first, side);
  allocator->free(first);
  void* const unproved = allocator->allocate(3_MiB, origin);
  EXPECT_NE(unproved, first) << "the side stream may still use it";
  on->fill(at(unproved), std::byte{3}, 512, origin);
  join(side, origin);
  on->fill(at(unproved), std::byte{4}, 512, origin);
  void* const proved = allocator->allocate(3_MiB, origin);
  EXPECT_EQ(proved, first) << "joined: every use of it comes before";
  on->fill(at(proved), std::byte{5}, 512, origin);
  free({unproved, proved});
  graph.end();
  graph.launch(origin);
  EXPECT_TRUE(filled(proved, std::byte{5}, 512, origin));
}

TEST_P(allocator_capture_contract, a_user_outside_the_capture_proves_nothing) {
  make("graph_capture_record_stream_reuse:True");
  const native_stream origin = new_stream();
  const native_stream outside = new_stream();
  const pool_id pool = allocator->create_pool();
  capture graph(*this, pool, origin);
  void* const first = allocator->allocate(3_MiB, origin);
  on->fill(at(first), std::byte{1}, 512, origin);
  allocator->record_stream(first, outside);
  allocator->free(first);
  on->fill(at(first), std::byte{1}, 512, origin);
  void* const second = allocator->allocate(3_MiB, origin);
  EXPECT_NE(second, first);
  allocator->free(second);
  graph.end();
}

TEST_P(allocator_capture_contract, two_graphs_share_a_pool) {
  make();
  const native_stream stream = new_stream();
  const pool_id pool = allocator->create_pool();
  capture one(*this, pool, stream);
  void* const kept = allocator->allocate(3_MiB, stream);
  void* const scratch = allocator->allocate(3_MiB, stream);
  on->fill(at(kept), std::byte{1}, 3_MiB, stream);
  on->fill(at(scratch), std::byte{2}, 3_MiB, stream);
  allocator->free(scratch);
  one.end();
  const auto held = reserved();
  capture two(*this, pool, stream);
  EXPECT_EQ(allocator->allocate(3_MiB, stream), scratch) << "what the first has freed";
  on->fill(at(scratch), std::byte{3}, 3_MiB, stream);
  two.end();
  EXPECT_EQ(reserved(), held);
  one.launch(stream);
  two.launch(stream);
  EXPECT_TRUE(filled(kept, std::byte{1}, 3_MiB, stream));
  EXPECT_TRUE(filled(scratch, std::byte{3}, 3_MiB, stream));
  free({kept, scratch});
}

TEST_P(allocator_capture_contract, other_streams_go_on_during_a_capture) {
  make();
  const native_stream stream = new_stream();
  const native_stream other = new_stream();
  const native_stream third = new_stream();
  const pool_id pool = allocator->create_pool();
  capture graph(*this, pool, stream);
  void* const captured = allocator->allocate(3_MiB, stream);
  on->fill(at(captured), std::byte{1}, 512, stream);
  allocator->end_allocate_to_pool(pool);
  void* const plain = allocator->allocate(5_MiB, other);
  allocator->record_stream(plain, third);
  allocator->free(plain);
  on->synchronize(third);
  EXPECT_EQ(allocator->allocate(5_MiB, other), plain);
  allocator->free(plain);
  allocator->empty_cache();
  allocator->begin_allocate_to_pool(pool);
  EXPECT_TRUE(allocator->owns(captured));
  graph.end();
  allocator->free(captured);
}

TEST_P(allocator_capture_contract, a_capture_that_failed_leaves_a_pool_that_recovers) {
  make();
  const native_stream stream = new_stream();
  const native_stream outside = new_stream();
  const pool_id pool = allocator->create_pool();
  {
    const scoped_event foreign(*on);
    on->record(foreign, outside);
    capture graph(*this, pool, stream);
    void* const block = allocator->allocate(3_MiB, stream);
    on->fill(at(block), std::byte{1}, 512, stream);
    EXPECT_THROW(on->wait(stream, foreign), invalid_argument);
    EXPECT_THROW(graph.end(), error);
    allocator->free(block);
  }
  allocator->release_pool(pool);
  allocator->empty_cache();
  EXPECT_EQ(reserved(), 0);
  free({allocator->allocate(3_MiB, stream)});
}

TEST_P(allocator_capture_contract, an_end_that_fails_leaves_nothing_stuck) {
  make();
  const native_stream other = new_stream();
  const native_stream stream = new_stream();
  const pool_id pool = allocator->create_pool();
  {
    capture graph(*this, pool, stream);
    void* const block = allocator->allocate(3_MiB, stream);
    allocator->record_stream(block, other);
    allocator->free(block);
    allocator->begin_capture(pool);  // another one that allocates here
    on->fail_call(driver_call::record, 0);
    EXPECT_THROW(graph.end(), driver_error);
    allocator->end_allocate_to_pool(pool);
  }
  EXPECT_TRUE(on->disarm());
  allocator->end_capture(pool);
  allocator->release_pool(pool);
  allocator->empty_cache();
  EXPECT_EQ(reserved(), 0);
  EXPECT_EQ(allocator->statistics().active.all.current, 0);
}

TEST_P(allocator_capture_contract, a_capture_that_was_not_told_of_leaves_nothing_stuck) {
  for (const bool told_too_early : {false, true}) {
    make();
    const native_stream origin = new_stream();
    const native_stream side = new_stream();
    const pool_id pool = allocator->create_pool();
    void* const block = allocator->allocate(3_MiB, origin);
    free(allocate(100, 100_KiB, origin));  // memory that could move
    {
      if (told_too_early) allocator->begin_capture(pool);
      scoped_capture graph(*on, origin);
      on->fill(at(block), std::byte{1}, 512, origin);
      join(origin, side);
      on->fill(at(block), std::byte{2}, 512, side);
      allocator->record_stream(block, side);
      allocator->free(block);
      if (told_too_early) allocator->end_capture(pool);
      EXPECT_EQ(refusal([&] { allocator->empty_cache(); }), "done");
      void* const other = allocator->allocate(12_MiB, origin);
      EXPECT_NE(other, block);
      allocator->free(other);
      join(side, origin);
      EXPECT_NO_THROW(graph.end()) << "nobody asked or waited for what is captured";
    }
    allocator->release_pool(pool);
    allow(static_cast<std::size_t>(reserved()));
    const auto held = static_cast<std::size_t>(reserved());
    allocator->free(allocator->allocate(held, origin));
    EXPECT_EQ(allocator->statistics().active.all.current, 0) << "waited for when memory is short";
  }
}

TEST_P(allocator_capture_contract, a_capture_waits_for_no_capture_of_others) {
  make();
  const native_stream stream = new_stream();
  const native_stream side = new_stream();
  const pool_id pool = allocator->create_pool();
  const pool_id other = allocator->create_pool();
  allocator->begin_capture(other);  // and it goes on
  {
    capture graph(*this, pool, stream);
    void* const block = allocator->allocate(3_MiB, stream);
    on->fill(at(block), std::byte{1}, 512, stream);
    join(stream, side);
    on->fill(at(block), std::byte{2}, 512, side);
    allocator->record_stream(block, side);
    allocator->free(block);
    join(side, stream);
    graph.end();
  }
  on->synchronize(stream);
  on->synchronize(side);
  allocator->release_pool(pool);
  EXPECT_THROW((void)allocator->pool_use_count(pool), invalid_argument) << "nothing lives in it";
  EXPECT_EQ(reserved(), 0);
  allocator->end_capture(other);
}

TEST_P(allocator_capture_contract, the_default_pool_is_not_captured_into) {
  make();
  EXPECT_TRUE(says(refusal([&] { allocator->begin_capture(pool_id{}); }), "create_pool"));
  free({allocator->allocate(3_MiB)});
  EXPECT_GE(allocator->empty_cache(), 3_MiB) << "its memory need not stay";
}

TEST_P(allocator_capture_contract, a_released_pool_is_not_captured_into) {
  make();
  const pool_id pool = allocator->create_pool();
  allocator->begin_allocate_to_pool(pool);
  void* const block = allocator->allocate(3_MiB);
  allocator->end_allocate_to_pool(pool);
  allocator->release_pool(pool);
  EXPECT_TRUE(says(refusal([&] { allocator->begin_capture(pool); }), "was released"));
  allocator->free(block);
}

TEST_P(allocator_capture_contract, memory_that_a_graph_replays_on_helps_nobody_out) {
  make(k_segments);
  allow(20_MiB);
  const native_stream stream = new_stream();
  const pool_id pool = allocator->create_pool({.use_on_oom = true});
  {
    capture graph(*this, pool, stream);
    void* const block = allocator->allocate(20_MiB, stream);
    on->fill(at(block), std::byte{9}, 512, stream);
    allocator->free(block);
    graph.end();
  }
  EXPECT_THROW((void)allocator->allocate(15_MiB, stream), out_of_memory);
  allocator->release_pool(pool);
  free({allocator->allocate(15_MiB, stream)});
}

TEST_P(allocator_capture_contract, begin_and_end_go_together) {
  make();
  const pool_id pool = allocator->create_pool();
  EXPECT_TRUE(says(refusal([&] { allocator->end_capture(pool); }), "begin_capture"));
  allocator->begin_capture(pool);
  allocator->begin_capture(pool);
  allocator->end_capture(pool);
  allocator->release_pool(pool);
  EXPECT_EQ(allocator->pool_use_count(pool), 0) << "the other capture still allocates there";
  allocator->end_capture(pool);
  allocator->empty_cache();
  EXPECT_TRUE(says(refusal([&] { (void)allocator->pool_use_count(pool); }), "no pool"));
}

}  // namespace evmm::test
