// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/allocator_contract.hpp"

#include <algorithm>
#include <thread>

// What happened: the recorded events, who is told of them, and snapshots.

namespace evmm::test {

class allocator_history_contract : public allocator_contract {
 protected:
  std::vector<trace_entry> events() const { return allocator->snapshot().device_traces.at(0); }
  std::vector<trace_action> actions() const {
    std::vector<trace_action> all;
    for (const trace_entry& each : events()) {
      if (each.action != trace_action::snapshot) all.push_back(each.action);
    }
    return all;
  }
  std::size_t calls(driver_call kind) const {
    const auto all = on->record_of_calls();
    return static_cast<std::size_t>(std::count(all.begin(), all.end(), kind));
  }
};

TEST_P(allocator_history_contract, nothing_is_recorded_unless_asked_for) {
  make();
  free({allocator->allocate(3_MiB)});
  EXPECT_TRUE(events().empty());
  allocator->record_history({.level = history_level::state});
  free({allocator->allocate(3_MiB)});
  EXPECT_TRUE(actions().empty()) << "state alone";
  allocator->record_history({.level = history_level::all});
  allocator->record_history({.level = history_level::off, .clear = false});
  free({allocator->allocate(3_MiB)});
  EXPECT_TRUE(actions().empty());
}

TEST_P(allocator_history_contract, events_come_in_their_order) {
  make(k_segments);
  allocator->record_history({});
  const native_stream stream = new_stream();
  void* const block = allocator->allocate(3_MiB - 1, stream);
  allocator->free(block);
  allocator->empty_cache();
  EXPECT_EQ(actions(),
            (std::vector<trace_action>{trace_action::segment_alloc, trace_action::alloc,
                                       trace_action::free_requested, trace_action::free_completed,
                                       trace_action::segment_free}));
  const auto all = events();
  EXPECT_EQ(all[0].bytes, 20_MiB);
  for (const trace_entry& each : {all[1], all[2], all[3]}) EXPECT_EQ(each.bytes, 3_MiB - 1);
  for (const trace_entry& each : {all[0], all[1], all[2], all[3], all[4]}) {
    EXPECT_EQ(each.at, at(block));
    EXPECT_EQ(each.stream, stream);
    EXPECT_EQ(each.device, 0);
    EXPECT_EQ(each.pool, (pool_number{0, 0}));
    EXPECT_GE(each.time_us, all[0].time_us);
  }
}

TEST_P(allocator_history_contract, maps_come_before_the_block_and_unmaps_after_it) {
  make();
  allocator->record_history({});
  allocator->free(allocator->allocate(6_MiB));
  allocator->empty_cache();
  EXPECT_EQ(
      actions(),
      (std::vector<trace_action>{
          trace_action::segment_map, trace_action::segment_map, trace_action::segment_map,
          trace_action::alloc, trace_action::free_requested, trace_action::free_completed,
          trace_action::segment_unmap, trace_action::segment_unmap, trace_action::segment_unmap}));
}

TEST_P(allocator_history_contract, a_deferred_free_completes_later) {
  make(k_segments);
  const native_stream other = new_stream();
  void* const block = allocator->allocate(3_MiB);
  allocator->record_history({});
  {
    const stream_gate gate(*on, other);
    allocator->record_stream(block, other);
    allocator->free(block);
    EXPECT_EQ(actions(), (std::vector<trace_action>{trace_action::free_requested}));
  }
  on->synchronize(other);
  allocator->empty_cache();
  EXPECT_EQ(actions().at(1), trace_action::free_completed);
}

TEST_P(allocator_history_contract, a_free_that_fails_is_no_event) {
  for (const char* const config : {"", "cross_stream_reuse:wait"}) {
    make(config);
    const native_stream other = new_stream();
    void* const block = allocator->allocate(3_MiB);
    allocator->record_history({});
    allocator->record_stream(block, other);
    on->fail_call(driver_call::record, 0);
    EXPECT_THROW(allocator->free(block), driver_error);
    EXPECT_TRUE(actions().empty());
    allocator->free(block);
    EXPECT_EQ(actions().at(0), trace_action::free_requested);
    on->synchronize(other);
    allocator->empty_cache();
    EXPECT_EQ(actions().at(1), trace_action::free_completed);
  }
}

TEST_P(allocator_history_contract, the_ring_keeps_the_last_events) {
  make(k_segments);
  void* const warm = allocator->allocate(4096);
  const std::vector<trace_action> skip = {trace_action::snapshot};
  allocator->record_history({.max_entries = 6, .skip = skip});
  for (std::size_t i = 1; i <= 5; ++i) allocator->free(allocator->allocate(i * 512));
  const auto kept = events();
  ASSERT_EQ(kept.size(), 6u);
  for (std::size_t i = 0; i < 6; ++i) EXPECT_EQ(kept[i].bytes, (i < 3 ? 4u : 5u) * 512);
  EXPECT_EQ(kept[0].action, trace_action::alloc);
  EXPECT_EQ(kept[5].action, trace_action::free_completed);
  allocator->record_history({.max_entries = 2, .clear = false, .skip = skip});
  EXPECT_EQ(events().at(0).action, trace_action::free_requested) << "the last ones stay";
  allocator->record_history({.max_entries = 2, .skip = skip});
  EXPECT_TRUE(actions().empty());
  allocator->free(warm);
}

TEST_P(allocator_history_contract, a_ring_that_grows_keeps_its_order) {
  make(k_segments);
  void* const warm = allocator->allocate(4096);
  const std::vector<trace_action> skip = {trace_action::snapshot, trace_action::free_requested,
                                          trace_action::free_completed};
  allocator->record_history({.max_entries = 3, .skip = skip});
  const auto sizes = [&] {
    std::vector<std::size_t> all;
    for (const trace_entry& each : events()) all.push_back(each.bytes / 512);
    return all;
  };
  const auto record = [&](std::size_t units) { allocator->free(allocator->allocate(units * 512)); };
  for (const std::size_t units : {1, 2, 3, 4}) record(units);
  EXPECT_EQ(sizes(), (std::vector<std::size_t>{2, 3, 4}));
  allocator->record_history({.max_entries = 5, .clear = false, .skip = skip});
  for (const std::size_t units : {5, 6}) record(units);
  EXPECT_EQ(sizes(), (std::vector<std::size_t>{2, 3, 4, 5, 6}));
  record(7);
  EXPECT_EQ(sizes(), (std::vector<std::size_t>{3, 4, 5, 6, 7}));
  allocator->free(warm);
}

TEST_P(allocator_history_contract, actions_can_be_skipped) {
  make(k_segments);
  allocator->record_history({.skip = {trace_action::free_requested, trace_action::segment_alloc}});
  allocator->free(allocator->allocate(3_MiB));
  EXPECT_EQ(actions(),
            (std::vector<trace_action>{trace_action::alloc, trace_action::free_completed}));
}

TEST_P(allocator_history_contract, stacks_are_kept_as_the_level_says) {
  const auto stacks = [&](history_level level, const char* config = k_segments) {
    make(config);
    allocator->record_history({.level = level, .stacks = true});
    void* const block = allocator->allocate(3_MiB);
    allocator->free(allocator->allocate(3_MiB));
    const auto found = allocator->snapshot();
    bool of_alloc = false, of_free = false, of_block = false;
    const bool of_segment = !found.segments.at(0).frames.empty();
    for (const trace_entry& each : found.device_traces.at(0)) {
      if (each.action == trace_action::alloc) of_alloc = !each.frames.empty();
      if (each.action == trace_action::free_requested) of_free = !each.frames.empty();
    }
    for (const block_snapshot& each : found.segments.at(0).blocks) {
      if (each.state == block_state::active_allocated) of_block = !each.frames.empty();
    }
    allocator->free(block);
    return std::vector<bool>{of_segment, of_block, of_alloc, of_free};
  };
  EXPECT_EQ(stacks(history_level::off), (std::vector<bool>{false, false, false, false}));
  EXPECT_EQ(stacks(history_level::state), (std::vector<bool>{true, true, false, false}));
  EXPECT_EQ(stacks(history_level::alloc), (std::vector<bool>{true, true, true, false}));
  EXPECT_EQ(stacks(history_level::all), (std::vector<bool>{true, true, true, true}));
  EXPECT_EQ(stacks(history_level::state, ""), (std::vector<bool>{true, true, false, false}));
}

TEST_P(allocator_history_contract, a_stack_goes_with_its_allocation) {
  make();
  allocator->record_history({.stacks = true});
  void* const block = allocator->allocate(3_MiB);
  allocator->record_history({.level = history_level::off});
  const auto stack_of_block = [&] {
    const auto now = allocator->snapshot();
    for (const block_snapshot& each : now.segments.at(0).blocks) {
      if (each.at == at(block)) return each.frames.size();
    }
    return std::size_t{0};
  };
  EXPECT_GT(stack_of_block(), 0u) << "recorded while it was";
  allocator->free(block);
  EXPECT_EQ(stack_of_block(), 0u);
  EXPECT_EQ(allocator->allocate(3_MiB), block);
  EXPECT_EQ(stack_of_block(), 0u) << "of another allocation";
  allocator->free(block);
}

TEST_P(allocator_history_contract, threads_add_their_own_notes) {
  make(k_segments);
  void* const warm = allocator->allocate(512);
  allocator->record_history({.skip = {trace_action::free_requested, trace_action::free_completed}});
  const auto one = [&] { allocator->free(allocator->allocate(512)); };
  caching_allocator::push_compile_context("graph 0");
  caching_allocator::push_compile_context("graph 0, part 1");
  caching_allocator::set_user_metadata("step 7");
  one();
  std::thread(one).join();
  caching_allocator::pop_compile_context();
  one();
  caching_allocator::pop_compile_context();
  caching_allocator::set_user_metadata("");
  one();
  EXPECT_THROW(caching_allocator::pop_compile_context(), invalid_argument);
  const auto all = events();
  ASSERT_GE(all.size(), 4u);
  EXPECT_EQ(all[0].compile_context, "graph 0, part 1");
  EXPECT_EQ(all[0].user_metadata, "step 7");
  EXPECT_EQ(all[1].compile_context + all[1].user_metadata, "") << "another thread";
  EXPECT_EQ(all[2].compile_context, "graph 0");
  EXPECT_EQ(all[3].compile_context + all[3].user_metadata, "");
  allocator->free(warm);
}

TEST_P(allocator_history_contract, annotations_are_in_the_snapshot) {
  make();
  allocator->annotate({{"name", "forward"}, {"stage", "START"}});
  const auto marks = allocator->snapshot().external_annotations;
  ASSERT_EQ(marks.size(), 1u);
  EXPECT_EQ(marks[0].values.at(1), (std::pair<std::string, std::string>{"stage", "START"}));
  EXPECT_GT(marks[0].time_us, 0);
}

TEST_P(allocator_history_contract, as_many_annotations_are_kept_as_events) {
  make();
  allocator->record_history({.max_entries = 3});
  const auto kept = [&] {
    std::vector<std::string> all;
    for (const auto& each : allocator->snapshot().external_annotations) {
      all.push_back(each.values.at(0).second);
    }
    return all;
  };
  for (const char* const step : {"1", "2", "3", "4", "5"}) allocator->annotate({{"step", step}});
  EXPECT_EQ(kept(), (std::vector<std::string>{"3", "4", "5"}));
  allocator->record_history({.max_entries = 2, .clear = false});
  EXPECT_EQ(kept(), (std::vector<std::string>{"4", "5"}));
}

TEST_P(allocator_history_contract, an_out_of_memory_is_an_event) {
  make();
  allow(8_MiB);
  allocator->record_history({.level = history_level::alloc, .stacks = true});
  EXPECT_THROW((void)allocator->allocate(64_MiB), out_of_memory);
  const auto all = events();
  const auto found = std::find_if(all.begin(), all.end(), [](const trace_entry& each) {
    return each.action == trace_action::oom;
  });
  ASSERT_NE(found, all.end());
  EXPECT_EQ(found->bytes, 64_MiB);
  EXPECT_GT(found->at, 64_MiB) << "what is free on the device";
  EXPECT_FALSE(found->frames.empty()) << "who asked for too much";
  make("expandable_segments_reserve:32M");
  allocator->record_history({});
  EXPECT_THROW((void)allocator->allocate(64_MiB), out_of_memory);
  const auto later = events();
  ASSERT_FALSE(later.empty()) << "addresses too few are an out-of-memory, too";
  EXPECT_EQ(later.front().action, trace_action::oom);
}

TEST_P(allocator_history_contract, observers_hear_after_a_map_and_before_an_unmap) {
  make();
  std::size_t maps = 0, unmaps = 0;
  bool after_map = true, before_unmap = true;
  auto observer = allocator->on_trace([&](const trace_entry& event) {
    if (event.action == trace_action::segment_map) {
      after_map = after_map && calls(driver_call::set_access) >= ++maps;
    } else if (event.action == trace_action::segment_unmap) {
      before_unmap = before_unmap && calls(driver_call::unmap) <= unmaps++;
    }
  });
  on->clear_record();
  allocator->free(allocator->allocate(6_MiB));
  allocator->empty_cache();
  EXPECT_EQ(maps, 3u);
  EXPECT_EQ(unmaps, 3u);
  EXPECT_TRUE(after_map);
  EXPECT_TRUE(before_unmap);
  EXPECT_TRUE(events().empty()) << "to listen is not to record";
  observer.reset();
  allocator->free(allocator->allocate(6_MiB));
  EXPECT_EQ(maps, 3u);
}

TEST_P(allocator_history_contract, functions_that_cannot_be_called_are_refused) {
  make();
  const auto refused = [&](const std::function<void()>& call) {
    return says(refusal(call), "is given no function to call");
  };
  EXPECT_TRUE(refused([&] { (void)allocator->on_trace(nullptr); }));
  EXPECT_TRUE(refused([&] { (void)allocator->on_out_of_memory(nullptr); }));
  EXPECT_TRUE(refused([&] { (void)allocator->on_shortage(nullptr); }));
  EXPECT_TRUE(refused([&] { allocator->begin_allocate_to_pool(pool_id{}, nullptr); }));
  allocator->free(allocator->allocate(6_MiB));
}

TEST_P(allocator_history_contract, observers_hear_before_a_segment_is_given_back) {
  make(k_segments);
  std::size_t releases_then = 99;
  const auto observer = allocator->on_trace([&](const trace_entry& event) {
    if (event.action == trace_action::segment_free) releases_then = calls(driver_call::unmap);
  });
  allocator->free(allocator->allocate(12_MiB));
  on->clear_record();
  allocator->empty_cache();
  EXPECT_EQ(releases_then, 0u);
}

TEST_P(allocator_history_contract, moved_handles_are_told_as_unmapped_and_mapped) {
  make();
  const auto all = allocate(4, 16_MiB);
  free({all[0], all[2]});
  allocator->record_history({});
  std::size_t mapped = 0, unmapped = 0;
  void* const large = allocator->allocate(32_MiB);
  for (const trace_entry& each : events()) {
    if (each.action == trace_action::segment_map) mapped += each.bytes;
    if (each.action == trace_action::segment_unmap) unmapped += each.bytes;
  }
  EXPECT_GT(mapped, 0u);
  EXPECT_EQ(mapped, unmapped) << "as much as before is held";
  free({all[1], all[3], large});
}

TEST_P(allocator_history_contract, snapshots_agree_with_the_statistics) {
  for (const char* const config : {"", k_segments}) {
    make(config);
    const native_stream stream = new_stream();
    const native_stream other = new_stream();
    const auto all = allocate(5, 3_MiB - 7, stream);
    const auto few = allocate(3, 700);
    free({all[1], all[3], few[0]});
    const stream_gate gate(*on, other);
    allocator->record_stream(all[4], other);
    allocator->free(all[4]);
    const auto now = allocator->statistics();
    std::size_t total = 0, allocated = 0, active = 0, requested = 0;
    address last = 0;
    for (const segment_snapshot& each : allocator->snapshot().segments) {
      EXPECT_GE(each.at, last) << "ascending";
      address next = each.at;
      std::size_t live = 0, busy = 0, asked = 0;
      for (const block_snapshot& block : each.blocks) {
        EXPECT_EQ(block.at, next) << "without gaps";
        next += block.bytes;
        if (block.state == block_state::active_allocated) live += block.bytes;
        if (block.state != block_state::inactive) busy += block.bytes;
        asked += block.state == block_state::active_allocated ? block.requested_bytes : 0;
      }
      EXPECT_EQ(next, each.at + each.total_bytes);
      EXPECT_EQ(live, each.allocated_bytes);
      EXPECT_EQ(busy, each.active_bytes);
      EXPECT_EQ(each.expandable, std::string_view(config).empty());
      last = next;
      total += each.total_bytes;
      allocated += live;
      active += busy;
      requested += asked;
    }
    EXPECT_EQ(total, static_cast<std::size_t>(now.reserved_bytes.all.current));
    EXPECT_EQ(allocated, static_cast<std::size_t>(now.allocated_bytes.all.current));
    EXPECT_EQ(active, static_cast<std::size_t>(now.active_bytes.all.current));
    EXPECT_EQ(requested, static_cast<std::size_t>(now.requested_bytes.all.current));
    free({all[0], all[2], few[1], few[2]});
  }
}

TEST_P(allocator_history_contract, a_snapshot_goes_through_its_pickle) {
  make("max_split_size_mb:64,roundup_power2_divisions:4");
  allocator->record_history({.stacks = true});
  const pool_id pool = allocator->create_pool();
  allocator->begin_allocate_to_pool(pool);
  void* const block = allocator->allocate(3_MiB);
  allocator->end_allocate_to_pool(pool);
  allocator->annotate({{"name", "here"}});
  const allocator_snapshot taken = allocator->snapshot();
  const allocator_snapshot read = from_pickle(to_pickle(taken));
  EXPECT_EQ(read.segments, taken.segments);
  EXPECT_EQ(read.device_traces, taken.device_traces);
  EXPECT_EQ(read.external_annotations, taken.external_annotations);
  allocator->free(block);
}

TEST_P(allocator_history_contract, a_snapshot_is_an_event_itself) {
  make();
  void* const block = allocator->allocate(3_MiB);
  allocator->record_history({});
  const auto all = events();
  ASSERT_EQ(all.size(), 1u);
  EXPECT_EQ(all[0].action, trace_action::snapshot);
  EXPECT_EQ(all[0].bytes, 3_MiB) << "what is active";
  allocator->free(block);
}

TEST_P(allocator_history_contract, settings_are_those_that_PyTorch_shows) {
  make("roundup_power2_divisions:[1:2,4:8,>:1]");
  const auto settings = allocator->snapshot({}, false).settings;
  for (const char* const key :
       {"PYTORCH_CUDA_ALLOC_CONF", "max_split_size", "garbage_collection_threshold",
        "expandable_segments", "pinned_num_register_threads", "release_lock_on_cudamalloc",
        "pinned_use_cuda_host_register", "graph_capture_record_stream_reuse",
        "roundup_power2_divisions"}) {
    EXPECT_TRUE(std::any_of(settings.begin(), settings.end(), [&](const auto& each) {
      return each.first == key;
    })) << key;
  }
}

}  // namespace evmm::test
