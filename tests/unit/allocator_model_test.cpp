// SPDX-License-Identifier: Apache-2.0
// Random operations against an oracle, by one thread and by several. EVMM_MODEL_OPERATIONS sets how
// many (10000000 for a long run). Seeds are fixed and printed; EVMM_MODEL_SEED, added to each,
// makes others of them.
#include "tests/unit/allocator_model.hpp"

#include <evmm/error.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <iostream>
#include <ostream>
#include <thread>

namespace evmm::test {

// NOLINTNEXTLINE(readability-identifier-naming): GoogleTest's name
void PrintTo(const model_case& each, std::ostream* out) {
  *out << each.name;
}

namespace {

using namespace evmm::units;

const std::vector<model_case>& cases() {
  static const std::vector<model_case> all = {
      {.name = "defaults", .config = "", .seed = 101},
      {.name = "waits",
       .config = "recycle_handles:wait,cross_stream_reuse:wait",
       .by_event = false,
       .seed = 102},
      {.name = "no_recycling", .config = "recycle_handles:never", .seed = 103},
      {.name = "segments", .config = "expandable_segments:False", .seed = 104},
      {.name = "limits",
       .config = "expandable_segments:False,max_split_size_mb:24,"
                 "garbage_collection_threshold:0.6,per_process_memory_fraction:0.9,"
                 "roundup_power2_divisions:4",
       .seed = 105},
      {.name = "reuse_in_capture",
       .config = "graph_capture_record_stream_reuse:True",
       .seed = 106}};
  return all;
}

model_case seeded(model_case given) {
  given.seed += model_seed();
  return given;
}

class allocator_model_of_one_thread : public testing::TestWithParam<model_case> {};

TEST_P(allocator_model_of_one_thread, holds) {
  allocator_model model(seeded(GetParam()));
  model.run(model_operations(cases().size() + 2));
  model.finish();
}

INSTANTIATE_TEST_SUITE_P(configurations, allocator_model_of_one_thread, testing::ValuesIn(cases()),
                         [](const auto& each) { return each.param.name; });

// --- several threads --------------------------------------------------------------------------

/// What the threads share. Blocks change hands: any thread frees what another has allocated.
class shared_model {
 public:
  shared_model(const char* config, std::size_t threads)
      : faults_(fault_driver::make(
            host_driver::make({.devices = 1, .device_bytes = 256_MiB, .numa_nodes = {0}}))),
        gates_(std::make_shared<gated_driver>(faults_)),
        descriptors_(faults_->alive().descriptors),
        oracle_(*gates_) {
    // Two a thread, and one for all.
    for (std::size_t i = 0; i < 2 * threads + 1; ++i) {
      streams_.push_back(gates_->create_stream(device_id{0}));
    }
    allocator_.emplace(gates_, device_id{0}, parse_options(config));
  }
  ~shared_model() { gates_->open_all(); }

  void run(std::size_t thread, std::size_t operations, std::uint64_t seed) {
    model_random random(seed);
    const native_event event = gates_->create_event(device_id{0});
    try {
      for (std::size_t i = 0; i < operations && !failed_; ++i) step(thread, random, event);
    } catch (const std::exception& failure) {
      fail(std::string("unexpected: ") + failure.what());
    }
    if (marks_.failed()) fail(marks_.failure());
    gates_->destroy_event(event);
  }

  void finish() {
    gates_->open_all();
    if (marks_.failed()) fail(marks_.failure());
    if (failed_) return;
    faults_->disarm();
    while (!order_.empty()) free(order_.size() - 1);
    allocator_->empty_cache();
    oracle_.settled();
    const auto now = allocator_->statistics();
    // Peaks depend on who was first; sums do not.
    EXPECT_EQ(now.allocation.all.allocated, allocated_);
    EXPECT_EQ(now.allocation.all.freed, allocated_);
    EXPECT_EQ(now.requested_bytes.all.allocated, requested_bytes_);
    EXPECT_EQ(now.requested_bytes.all.freed, requested_bytes_);
    for (const auto* each : {&now.allocation, &now.active, &now.allocated_bytes, &now.active_bytes,
                             &now.requested_bytes, &now.reserved_bytes}) {
      EXPECT_EQ(each->all.current, 0);
      EXPECT_EQ(each->small_pool.current, 0);
      EXPECT_EQ(each->large_pool.current, 0);
    }
    check_inside(*allocator_);
    void* const large = allocator_->allocate(192_MiB, streams_[0]);
    allocator_->free(large);
    allocator_.reset();
    for (const native_stream each : streams_) gates_->destroy_stream(each);
    alive_counts nothing;
    nothing.descriptors = descriptors_;
    EXPECT_EQ(faults_->alive(), nothing);
    if (marks_.failed()) fail(marks_.failure());
  }
  std::int64_t blocks() const { return allocated_; }
  bool failed() const { return failed_; }

 private:
  void fail(const std::string& what) {
    if (!failed_.exchange(true)) ADD_FAILURE() << what;
    gates_->open_all();
  }

  native_stream stream_of(std::size_t thread, model_random& random) {
    const std::size_t which = random.below(8);
    return which == 0 ? streams_.back() : streams_[2 * thread + which % 2];
  }

  void step(std::size_t thread, model_random& random, native_event event) {
    if (marks_.failed()) return fail(marks_.failure());
    switch (random.below(128)) {
      case 0:
        if (gates_->closed() < 3) gates_->close(stream_of(thread, random));
        return;
      case 1:
      case 2:
        return gates_->open_oldest();
      case 3:
        return gates_->open_all();
      case 4:
        if (random.one_in(16)) allocator_->empty_cache();
        return;
      case 5:
        return look(random);
      case 6:
        // Of what only allocate() calls, for the failure may be any thread's.
        faults_->fail_call(random.one_in(2) ? driver_call::create : driver_call::map, 0,
                           error_category::driver_error);
        return;
      default:
        break;
    }
    if (random.one_in(8)) return use(thread, random, event);
    if (random.one_in(2)) return allocate(stream_of(thread, random), random);
    std::unique_lock lock(mutex_);
    if (order_.empty()) return;
    const std::size_t which = random.below(order_.size());
    lock.unlock();
    free(which);
  }

  void look(model_random& random) {
    const auto now = allocator_->statistics();
    if (now.allocation.all.current < 0 || now.allocated_bytes.all.current < 0 ||
        now.reserved_bytes.all.current < 0) {
      fail("a count below zero");
    }
    static_cast<void>(allocator_->cache_info());
    if (random.one_in(8)) static_cast<void>(allocator_->snapshot({}, false));
  }

  void allocate(native_stream stream, model_random& random) {
    const std::size_t bytes = std::min(random.size(), 24_MiB);
    void* at = nullptr;
    try {
      at = allocator_->allocate(bytes, stream);
    } catch (const out_of_memory&) {
      return;
    } catch (const driver_error&) {
      return;
    }
    live_block block = {.at = at,
                        .bytes = bytes,
                        .block_bytes = allocator_->base_allocation(at).block_bytes,
                        .stream = stream,
                        .small = bytes <= 1_MiB};
    const std::lock_guard lock(mutex_);
    block.tag = 0x7EAD000000000000 + static_cast<std::uint64_t>(++allocated_);
    requested_bytes_ += static_cast<std::int64_t>(bytes);
    if (const auto wrong = oracle_.add(block); !wrong.empty()) return fail(wrong);
    marks_.write(*gates_, stream, at, bytes, block.tag);
    order_.push_back(at);
  }

  void use(std::size_t thread, model_random& random, native_event event) {
    const std::lock_guard lock(mutex_);
    if (order_.empty()) return;
    live_block& block = oracle_.at(reinterpret_cast<address>(order_[random.below(order_.size())]));
    const native_stream user = stream_of(thread, random);
    if (user == block.stream) return;
    gates_->record(event, block.stream);
    gates_->wait(user, event);
    marks_.check(*gates_, user, block.at, block.bytes, block.tag, "used on another stream");
    allocator_->record_stream(block.at, user);
    if (std::find(block.users.begin(), block.users.end(), user) == block.users.end()) {
      block.users.push_back(user);
    }
  }

  void free(std::size_t which) {
    live_block block;
    {
      const std::lock_guard lock(mutex_);
      if (which >= order_.size()) return;
      block = oracle_.at(reinterpret_cast<address>(order_[which]));
      order_[which] = order_.back();
      order_.pop_back();
      marks_.check(*gates_, block.stream, block.at, block.bytes, block.tag, "at its end");
      for (const native_stream user : block.users) {
        marks_.check(*gates_, user, block.at, block.bytes, block.tag, "at its end, elsewhere");
      }
      // Before the allocator hears of it: another thread may get the memory at once.
      oracle_.remove(live_block(block));
    }
    allocator_->free(block.at);
  }

  const std::shared_ptr<fault_driver> faults_;
  const std::shared_ptr<gated_driver> gates_;
  const std::size_t descriptors_;
  std::vector<native_stream> streams_;
  std::optional<caching_allocator> allocator_;
  marker marks_;
  std::atomic<bool> failed_{false};

  std::mutex mutex_;  ///< of what follows
  allocator_oracle oracle_;
  std::vector<void*> order_;
  std::int64_t allocated_ = 0;
  std::int64_t requested_bytes_ = 0;
};

class allocator_model_of_threads : public testing::TestWithParam<model_case> {};

TEST_P(allocator_model_of_threads, holds) {
  constexpr std::size_t threads = 4;
  const std::size_t operations = model_operations(cases().size() + 2) / threads;
  const model_case given = seeded(GetParam());
  shared_model model(given.config, threads);
  std::vector<std::thread> running;
  for (std::size_t i = 0; i < threads; ++i) {
    running.emplace_back([&, i] { model.run(i, operations, given.seed + i); });
  }
  for (auto& each : running) each.join();
  model.finish();
  EXPECT_FALSE(model.failed()) << "seed " << given.seed;
  std::cout << given.name << ": seed " << given.seed << ", " << threads << " threads, "
            << operations << " operations each, " << model.blocks() << " blocks\n";
}

INSTANTIATE_TEST_SUITE_P(
    configurations, allocator_model_of_threads,
    testing::Values(model_case{.name = "defaults", .config = "", .seed = 201},
                    model_case{.name = "waits",
                               .config = "recycle_handles:wait,cross_stream_reuse:wait",
                               .by_event = false,
                               .seed = 202}),
    [](const auto& each) { return each.param.name; });

}  // namespace
}  // namespace evmm::test
