// SPDX-License-Identifier: Apache-2.0
// The model's pools, captures, and its end.
#include "tests/unit/allocator_model.hpp"

#include <evmm/error.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <iostream>

namespace evmm::test {

using namespace evmm::units;

// --- pools ------------------------------------------------------------------------------------

void allocator_model::end_route(int pool) {
  const auto from = std::find_if(routes_.begin(), routes_.end(),
                                 [&](const route& each) { return each.pool == pool; });
  if (from == routes_.end()) return;
  allocator_->end_allocate_to_pool(pools_[static_cast<std::size_t>(pool)].id);
  routes_.erase(from);
}

void allocator_model::release(int pool) {
  end_route(pool);
  auto& known = pools_[static_cast<std::size_t>(pool)];
  EXPECT_EQ(allocator_->pool_use_count(known.id), 1);
  allocator_->release_pool(known.id);
  known.released = true;
}

void allocator_model::change_pools() {
  std::vector<int> mine;
  for (std::size_t i = 1; i < pools_.size(); ++i) {
    const int number = static_cast<int>(i);
    const bool of_graph =
        std::any_of(graphs_.begin(), graphs_.end(),
                    [&](const captured_graph& each) { return each.pool == number; });
    if (!pools_[i].released && !of_graph) mine.push_back(number);
  }
  if (mine.empty() || (mine.size() < 3 && random_.one_in(4))) {
    note("create a pool");
    const pool_options options = {.use_on_oom = random_.one_in(3), .no_split = random_.one_in(4)};
    pools_.push_back({allocator_->create_pool(options), options});
    return;
  }
  const int chosen = mine[random_.below(mine.size())];
  const pool_id id = pools_[static_cast<std::size_t>(chosen)].id;
  const bool routed = std::any_of(routes_.begin(), routes_.end(),
                                  [&](const route& each) { return each.pool == chosen; });
  switch (random_.below(4)) {
    case 0:
      note("release pool", static_cast<std::size_t>(chosen));
      return release(chosen);
    case 1:
      note("retain and release pool", static_cast<std::size_t>(chosen));
      allocator_->retain_pool(id);
      EXPECT_EQ(allocator_->pool_use_count(id), 2);
      return allocator_->release_pool(id);
    default:
      break;
  }
  if (routed) {
    note("end of allocating to pool", static_cast<std::size_t>(chosen));
    return end_route(chosen);
  }
  if (routes_.size() == 2) return;
  note("allocate to pool", static_cast<std::size_t>(chosen));
  const native_stream stream = any_stream();
  const bool whole_thread = random_.one_in(3);
  if (whole_thread) {
    allocator_->begin_allocate_to_pool(id);
  } else {
    allocator_->begin_allocate_to_pool(id, [stream](native_stream asks) { return asks == stream; });
  }
  routes_.push_back({chosen, stream, whole_thread});
}

// --- captures ---------------------------------------------------------------------------------

void allocator_model::capture() {
  if (graphs_.size() == 2) return drop_graph(0);
  note("capture");
  // A captured stream has no time, so nothing is held meanwhile.
  gates_->open_all();
  const native_stream stream = streams_[1 + random_.below(k_streams - 1)];
  native_stream forked = stream;
  while (forked == stream) forked = streams_[1 + random_.below(k_streams - 1)];
  gates_->synchronize(stream);
  gates_->synchronize(forked);

  const int number = static_cast<int>(pools_.size());
  pools_.push_back({allocator_->create_pool(), {}});
  const pool_id id = pools_.back().id;
  host_->begin_capture(stream);
  allocator_->begin_capture(id);
  allocator_->begin_allocate_to_pool(id, [stream](native_stream asks) { return asks == stream; });
  routes_.push_back({number, stream, false});

  captured_graph made = {.work = nullptr, .stream = stream, .pool = number};
  const native_event event = gates_->create_event(device_id{0});
  // Used on the other stream since that was last joined: not to be handed out again before.
  std::vector<live_block> used;
  std::vector<live_block> used_and_freed;
  const auto join = [&] {
    gates_->record(event, forked);
    gates_->wait(stream, event);
    used.clear();
    used_and_freed.clear();
  };
  for (std::size_t n = 2 + random_.below(10); n > 0; --n) {
    const auto block = allocate_block(1 + random_.below(3_MiB), stream, true);
    if (!block) break;
    oracle_.keep(number, *block);
    for (const live_block& each : used_and_freed) {
      EXPECT_TRUE(block->end() <= each.begin() || each.end() <= block->begin())
          << "in a capture, and another stream of it still uses " << each.at;
    }
    if (random_.one_in(2)) {
      gates_->record(event, stream);
      gates_->wait(forked, event);
      marks_.check(*gates_, forked, block->at, block->bytes, block->tag, "in a graph, elsewhere");
      allocator_->record_stream(block->at, forked);
      oracle_.at(block->begin()).users.push_back(forked);
      used.push_back(*block);
      if (random_.one_in(3)) join();
    }
    marks_.check(*gates_, stream, block->at, block->bytes, block->tag, "in a graph");
    made.left.push_back(block->at);
    if (random_.one_in(2)) {
      const std::size_t which = random_.below(made.left.size());
      const live_block freed = oracle_.at(reinterpret_cast<address>(made.left[which]));
      free_block(freed);
      made.left.erase(made.left.begin() + static_cast<std::ptrdiff_t>(which));
      for (const live_block& each : used) {
        if (each.at == freed.at) used_and_freed.push_back(freed);
      }
    }
    compare_often();
  }
  if (!used.empty()) join();
  made.work = host_->end_capture(stream);
  allocator_->end_capture(id);
  end_route(number);
  gates_->destroy_event(event);
  graphs_.push_back(std::move(made));
}

void allocator_model::replay_or_drop_graph() {
  if (graphs_.empty()) return;
  const std::size_t which = random_.below(graphs_.size());
  if (random_.one_in(16)) return drop_graph(which);
  note("replay a graph");
  host_->launch_graph(graphs_[which].work, graphs_[which].stream);
}

void allocator_model::drop_graph(std::size_t which) {
  note("drop a graph");
  const captured_graph dropped = std::move(graphs_[which]);
  graphs_.erase(graphs_.begin() + static_cast<std::ptrdiff_t>(which));
  gates_->synchronize(dropped.stream);
  for (void* const at : dropped.left) {
    free_block(live_block(oracle_.at(reinterpret_cast<address>(at))));
  }
  oracle_.forget(dropped.pool);
  release(dropped.pool);
}

// --- the end ----------------------------------------------------------------------------------

void allocator_model::finish() {
  gates_->open_all();
  if (testing::Test::HasFailure()) return;
  note("the end");
  while (!graphs_.empty()) drop_graph(0);
  while (!order_.empty()) free_one();
  for (std::size_t i = 1; i < pools_.size(); ++i) {
    if (!pools_[i].released) release(static_cast<int>(i));
  }
  empty_cache();
  compare_often();
  EXPECT_EQ(allocator_->statistics().reserved_bytes.all.current, 0);
  EXPECT_EQ(faults_->alive().handles, 0u);

  // Nothing is stranded: nearly all of the device serves one request.
  void* const large = allocator_->allocate(k_capacity * 3 / 4, streams_[1]);
  allocator_->free(large);
  allocator_.reset();

  for (std::size_t i = 1; i < k_streams; ++i) gates_->destroy_stream(streams_[i]);
  gates_->destroy_event(event_);
  alive_counts nothing;
  nothing.descriptors = descriptors_;
  EXPECT_EQ(faults_->alive(), nothing);
  if (marks_.failed()) ADD_FAILURE() << marks_.failure();
  std::cout << what_.name << ": seed " << what_.seed << ", " << operation_ << " operations, "
            << tags_ << " blocks, " << shortages_ << " times out of memory, " << failed_calls_
            << " driver calls failed\n";
}

}  // namespace evmm::test
