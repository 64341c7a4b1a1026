// SPDX-License-Identifier: Apache-2.0
#include "tests/unit/allocator_model.hpp"

#include "lib/support/environment.hpp"
#include "lib/support/format.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

namespace evmm::test {

using namespace evmm::units;

namespace {

constexpr device_id k_device{0};
constexpr std::size_t k_small_limit = 1_MiB;
/// What one block can keep from all others: a segment that nothing else fits into.
constexpr std::size_t k_most_pinned = 22_MiB;

}  // namespace

std::size_t model_operations(std::size_t runs) {
  const auto set =
      environment_integer("EVMM_MODEL_OPERATIONS", 1, std::numeric_limits<long>::max());
  return std::max<std::size_t>(1, static_cast<std::size_t>(set.value_or(240'000)) / runs);
}

std::uint64_t model_seed() {
  return static_cast<std::uint64_t>(
      environment_integer("EVMM_MODEL_SEED", 0, std::numeric_limits<long>::max()).value_or(0));
}

std::size_t model_random::size() {
  switch (below(16)) {
    case 0:
      return 12_MiB + below(24_MiB);
    case 1:
    case 2:
      return 1 + below(12_MiB);
    case 3:
    case 4:
    case 5:
      return 1 + below(2_MiB);
    case 6:
      return 512 * (1 + below(4096));
    case 7:
    case 8:
    case 9:
      return 1 + below(64_KiB);
    default:
      return 1 + below(4_KiB);
  }
}

allocator_model::allocator_model(const model_case& what)
    : what_(what),
      random_(what.seed),
      host_(host_driver::make({.devices = 1, .device_bytes = k_capacity, .numa_nodes = {0}})),
      faults_(fault_driver::make(host_)),
      gates_(std::make_shared<gated_driver>(faults_)),
      descriptors_(faults_->alive().descriptors),
      oracle_(*gates_) {
  for (std::size_t i = 1; i < k_streams; ++i) streams_[i] = gates_->create_stream(k_device);
  event_ = gates_->create_event(k_device);
  allocator_.emplace(gates_, k_device, parse_options(what.config));
}

allocator_model::~allocator_model() {
  // After a failure finish() may not have been reached; nothing may hang.
  gates_->open_all();
}

void allocator_model::note(const char* what, std::size_t value) {
  notes_[notes_made_++ % notes_.size()] = {operation_, what, value};
}

void allocator_model::run(std::size_t operations) {
  while (operation_ < operations) {
    ++operation_;
    if (operation_ % 65536 == 0) faults_->clear_record();
    try {
      step();
      look_inside();
      compare_often();
      if (random_.one_in(512)) compare_seldom();
    } catch (const std::exception& failure) {
      ADD_FAILURE() << "unexpected: " << failure.what();
    }
    if (marks_.failed()) ADD_FAILURE() << marks_.failure();
    if (!testing::Test::HasFailure()) continue;
    std::string last;
    for (std::size_t i = notes_made_ - std::min(notes_made_, notes_.size()); i < notes_made_; ++i) {
      const noted& each = notes_[i % notes_.size()];
      last += fmt::format("  {}: {} {}\n", each.operation, each.what, each.value);
    }
    ADD_FAILURE() << what_.name << ", seed " << what_.seed << ": operation " << operation_
                  << "; before it:\n"
                  << last;
    return;
  }
}

void allocator_model::step() {
  if (random_.one_in(400)) growing_ = !growing_;
  switch (random_.below(64)) {
    case 0:
    case 1:
      return change_gates();
    case 2:
    case 3:
    case 4:
      return use_on_another_stream();
    case 5:
      return allocate_where_freed();
    case 6:
      return change_pools();
    case 7:
      return do_wrong();
    case 8:
      return random_.one_in(16) ? empty_cache() : change_gates();
    case 9:
      return random_.one_in(16) ? capture() : use_on_another_stream();
    case 10:
      return replay_or_drop_graph();
    case 11:
      return random_.one_in(16) ? reset_statistics() : free_one();
    case 12:
      return random_.one_in(32) ? free_most() : free_one();
    default:
      break;
  }
  // Three against one, so that memory runs out again and again, and is given up again.
  if (random_.below(4) == 0 ? !growing_ : growing_) {
    allocate();
  } else {
    free_one();
  }
}

// --- allocating -------------------------------------------------------------------------------

bool allocator_model::arm() {
  if (!random_.one_in(24)) return false;
  faults_->fail_call(random_.below(5), random_.one_in(2) ? error_category::driver_error
                                                         : error_category::out_of_memory);
  return true;
}

int allocator_model::route_of(native_stream stream) const {
  for (auto each = routes_.rbegin(); each != routes_.rend(); ++each) {
    if (each->whole_thread || each->stream == stream) return each->pool;
  }
  return 0;
}

std::optional<live_block> allocator_model::took(void* at, std::size_t bytes, native_stream stream,
                                                bool captured) {
  const auto place = allocator_->base_allocation(at);
  live_block block = {.at = at,
                      .bytes = bytes,
                      .block_bytes = place.block_bytes,
                      .stream = stream,
                      .small = bytes <= k_small_limit,
                      .pool = route_of(stream),
                      .tag = 0xA110C00000000000 + ++tags_,
                      .captured = captured};
  EXPECT_EQ(block.begin() % 512, 0u);
  EXPECT_EQ(block.block_bytes % 512, 0u);
  EXPECT_GE(block.block_bytes, bytes);
  EXPECT_EQ(static_cast<std::byte*>(place.base) + place.offset, at);
  EXPECT_LE(place.offset + place.block_bytes, place.bytes);
  EXPECT_TRUE(allocator_->owns(at));
  if (const auto wrong = oracle_.add(block); !wrong.empty()) {
    ADD_FAILURE() << wrong;
    return {};
  }
  live_bytes_ += block.block_bytes;
  marks_.write(*gates_, stream, at, bytes, block.tag);
  return block;
}

std::optional<live_block> allocator_model::allocate_block(std::size_t bytes, native_stream stream,
                                                          bool captured) {
  note(captured ? "allocate, captured" : "allocate", bytes);
  const bool armed = !captured && arm();
  void* at = nullptr;
  try {
    at = allocator_->allocate(bytes, stream);
    if (armed && faults_->disarm()) ++failed_calls_;
    EXPECT_NE(at, nullptr);
  } catch (const error& failure) {
    const bool on_purpose = armed && faults_->disarm();
    failed_calls_ += on_purpose ? 1 : 0;
    if (failure.category() == error_category::out_of_memory) {
      if (!on_purpose && !captured) check_shortage(bytes, failure.what());
    } else {
      EXPECT_TRUE(on_purpose) << failure.what();
    }
    return {};
  }
  return took(at, bytes, stream, captured);
}

void allocator_model::check_shortage(std::size_t bytes, const std::string& said) {
  ++shortages_;
  // Only where there is memory however unfortunate the live blocks lie: those that wait for
  // streams have come back, since memory is short.
  std::size_t held = bytes + k_most_pinned;
  for (const auto& [begin, block] : oracle_.live()) held += block.block_bytes + k_most_pinned;
  // Pools in use keep what they have.
  for (std::size_t i = 1; i < pools_.size(); ++i) {
    if (pools_[i].released) continue;
    held +=
        static_cast<std::size_t>(allocator_->statistics(pools_[i].id).reserved_bytes.all.current);
  }
  EXPECT_GT(held, k_capacity) << "with " << oracle_.live().size() << " live blocks: " << said;
}

void allocator_model::allocate() {
  if (const auto block = allocate_block(random_.size(), any_stream(), false)) {
    order_.push_back(block->at);
  }
}

void allocator_model::allocate_where_freed() {
  if (order_.empty()) return;
  const std::size_t which = random_.below(order_.size());
  const live_block block = oracle_.at(reinterpret_cast<address>(order_[which]));
  note("allocate where just freed", block.bytes);
  const bool same_pool = route_of(block.stream) == block.pool;
  if (!free_block(block)) return;
  order_[which] = order_.back();
  order_.pop_back();
  void* const at = allocator_->allocate_at(block.at, block.bytes, block.stream);
  // A pool that lends may have given the block; which one that was is not told.
  const bool lent = std::any_of(pools_.begin(), pools_.end(),
                                [](const pool& each) { return each.options.use_on_oom; });
  if (at == nullptr) {
    EXPECT_FALSE(same_pool && block.users.empty() && !lent) << "the block was free a moment ago";
    return;
  }
  EXPECT_EQ(at, block.at);
  EXPECT_TRUE(same_pool || lent) << "of another pool than the request's";
  if (took(at, block.bytes, block.stream, false)) order_.push_back(at);
}

// --- using and freeing ------------------------------------------------------------------------

void allocator_model::use(live_block& block, native_stream user) {
  if (user == block.stream) return;
  // The other stream sees what the owner has written.
  gates_->record(event_, block.stream);
  gates_->wait(user, event_);
  marks_.check(*gates_, user, block.at, block.bytes, block.tag, "used on another stream");
  allocator_->record_stream(block.at, user);
  if (std::find(block.users.begin(), block.users.end(), user) == block.users.end()) {
    block.users.push_back(user);
  }
}

void allocator_model::use_on_another_stream() {
  if (order_.empty()) return;
  note("use on another stream");
  use(oracle_.at(reinterpret_cast<address>(order_[random_.below(order_.size())])), any_stream());
}

bool allocator_model::free_block(const live_block& block) {
  note("free", block.bytes);
  if (!block.captured) {
    marks_.check(*gates_, block.stream, block.at, block.bytes, block.tag, "at its end");
    for (const native_stream user : block.users) {
      marks_.check(*gates_, user, block.at, block.bytes, block.tag, "at its end, elsewhere");
    }
  }
  const bool armed = !block.captured && arm();
  bool sure = true;
  try {
    allocator_->free(block.at);
    if (armed && faults_->disarm()) sure = false;
  } catch (const error& failure) {
    const bool on_purpose = armed && faults_->disarm();
    EXPECT_TRUE(on_purpose) << failure.what();
    failed_calls_ += on_purpose ? 1 : 0;
    if (allocator_->owns(block.at)) return false;
    sure = false;
  }
  live_bytes_ -= block.block_bytes;
  oracle_.remove(live_block(block), sure);
  return true;
}

void allocator_model::free_one() {
  if (order_.empty()) return;
  const std::size_t which = random_.below(order_.size());
  const live_block block = oracle_.at(reinterpret_cast<address>(order_[which]));
  if (!free_block(block)) return;
  order_[which] = order_.back();
  order_.pop_back();
}

void allocator_model::free_most() {
  for (std::size_t n = order_.size() - order_.size() / 16; n > 0; --n) free_one();
}

void allocator_model::empty_cache() {
  note("empty the cache");
  allocator_->empty_cache();
  if (what_.by_event) {
    EXPECT_EQ(oracle_.active(true).least, static_cast<std::int64_t>(oracle_.live().size()))
        << "a stream that used a freed block is still held";
  }
  oracle_.settled();
  const auto now = allocator_->statistics();
  EXPECT_EQ(now.active.all.current, now.allocation.all.current);
  EXPECT_EQ(now.active_bytes.all.current, now.allocated_bytes.all.current);
}

void allocator_model::do_wrong() {
  note("do wrong");
  EXPECT_EQ(allocator_->allocate(0, any_stream()), nullptr);
  allocator_->free(nullptr);
  allocator_->record_stream(nullptr, any_stream());
  EXPECT_THROW(static_cast<void>(allocator_->allocate(std::size_t{1} << 60)), invalid_argument);
  void* const foreign = gates_.get();
  EXPECT_THROW(allocator_->free(foreign), invalid_argument);
  EXPECT_FALSE(allocator_->owns(foreign));
  EXPECT_THROW(static_cast<void>(allocator_->base_allocation(foreign)), invalid_argument);
  EXPECT_EQ(allocator_->allocate_at(foreign, 512, any_stream()), nullptr);
  if (order_.empty()) return;
  void* const at = order_[random_.below(order_.size())];
  EXPECT_THROW(allocator_->free(static_cast<std::byte*>(at) + 256), invalid_argument);
  EXPECT_EQ(allocator_->allocate_at(at, 512, any_stream()), nullptr) << "it is not free";
}

void allocator_model::change_gates() {
  note("gates");
  if (gates_->closed() < 2 && random_.one_in(2)) {
    gates_->close(any_stream());
  } else if (random_.one_in(3)) {
    gates_->open_all();
  } else {
    gates_->open_oldest();
  }
}

void allocator_model::reset_statistics() {
  note("reset statistics");
  if (random_.one_in(2)) {
    allocator_->reset_peaks();
    oracle_.reset_peaks();
  } else {
    allocator_->reset_totals();
    oracle_.reset_totals();
  }
}

// --- looking ----------------------------------------------------------------------------------

void allocator_model::look_inside() {
  check_inside(*allocator_);
}

void allocator_model::compare_often() {
  const auto now = allocator_->statistics();
  const auto wrong = oracle_.compare(now);
  EXPECT_TRUE(wrong.empty()) << wrong;
  const auto active = oracle_.active(what_.by_event);
  EXPECT_GE(now.active.all.current, active.least);
  EXPECT_LE(now.active.all.current, active.most);
  EXPECT_GE(now.active_bytes.all.current, active.least_bytes);
  EXPECT_LE(now.active_bytes.all.current, active.most_bytes);
  EXPECT_GE(now.reserved_bytes.all.current, now.active_bytes.all.current);
  EXPECT_LE(now.reserved_bytes.all.current, static_cast<std::int64_t>(k_capacity));
  EXPECT_LE(now.mapped_bytes, now.reserved_bytes.all.current);
}

void allocator_model::compare_seldom() {
  const auto now = allocator_->statistics();
  const auto alive = faults_->alive();
  EXPECT_EQ(now.reserved_bytes.all.current, static_cast<std::int64_t>(alive.created_bytes));
  // A handle may be mapped at addresses that it left, too.
  EXPECT_LE(now.mapped_bytes, static_cast<std::int64_t>(alive.mapped_bytes));
  EXPECT_EQ(now.mapped_bytes, now.reserved_bytes.all.current);
  EXPECT_EQ(allocator_->report().allocated_bytes, live_bytes_);

  for (std::size_t i = 1; i < pools_.size(); ++i) {
    if (pools_[i].released || pools_[i].options.use_on_oom) continue;
    const int number = static_cast<int>(i);
    EXPECT_EQ(allocator_->statistics(pools_[i].id).allocation.all.current,
              static_cast<std::int64_t>(oracle_.live_in(number)));
    std::vector<void*> expected;
    for (const auto& [begin, block] : oracle_.live()) {
      if (block.pool == number) expected.push_back(block.at);
    }
    EXPECT_TRUE(allocator_->live_allocations_are(pools_[i].id, expected));
  }

  std::size_t live = 0;
  address end = 0;
  for (const auto& segment : allocator_->snapshot({}, false).segments) {
    EXPECT_GE(segment.at, end) << "segments ascend";
    address at = segment.at;
    for (const auto& block : segment.blocks) {
      EXPECT_EQ(block.at, at) << "blocks cover their segment";
      at = block.at + block.bytes;
      if (block.state != block_state::active_allocated) continue;
      ++live;
      const auto known = oracle_.live().find(block.at);
      if (known == oracle_.live().end()) {
        ADD_FAILURE() << format_address(block.at) << " is not live";
        continue;
      }
      EXPECT_EQ(block.bytes, known->second.block_bytes);
      EXPECT_EQ(block.requested_bytes, known->second.bytes);
      EXPECT_EQ(segment.stream, known->second.stream);
    }
    end = segment.at + segment.total_bytes;
    EXPECT_EQ(at, end);
  }
  EXPECT_EQ(live, oracle_.live().size());
}

}  // namespace evmm::test
