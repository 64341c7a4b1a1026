// SPDX-License-Identifier: Apache-2.0
#include "tests/support/heap_cases.hpp"

#include <evmm/error.hpp>
#include <evmm/units.hpp>

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <thread>
#include <vector>

namespace evmm::test {

using namespace evmm::units;

namespace {

struct random_block {
  std::size_t offset;
  std::size_t bytes;
  std::size_t stream;
  std::uint8_t value;
};

/// The first bytes of a block, copied out behind its stream's work, and what they must be.
struct probe {
  std::array<std::uint8_t, 64> found{};
  std::size_t bytes = 0;
  std::uint8_t value = 0;
};

class random_heap {
 public:
  random_heap(const rank_context& at, std::uint64_t seed)
      : at_(at),
        same_(seed),
        own_(seed * 1000 + static_cast<std::uint64_t>(at.ranks->rank().value)),
        heap_(at.make({.reserve = 256_MiB}),
              {.growth_step = 4_MiB, .device_limit = 24_MiB, .host_limit = 96_MiB}) {
    for (native_stream& stream : streams_) stream = at.on->create_stream(at.device);
    pools_.push_back(heap_.create_pool());
  }
  ~random_heap() {
    for (const native_stream stream : streams_) at_.on->destroy_stream(stream);
  }

  void run(std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      delay_some_stream();
      const std::size_t what = below(100);
      if (what < 46) {
        allocate();
      } else if (what < 92) {
        free();
      } else if (what < 97) {
        record();
      } else {
        change(what);
      }
      if (i % 100 == 99) heap_.check_invariants();
    }
    while (!live_.empty()) free();
    for (const native_stream stream : streams_) at_.on->synchronize(stream);
    EXPECT_EQ(*wrong_, 0) << "a block was touched by somebody else while it was live";
    heap_.verify();
    const auto sums = at_.ranks->all_gather_value(heap_.checksum());
    for (const std::uint64_t sum : sums) EXPECT_EQ(sum, sums[0]);
    const auto offsets = at_.ranks->all_gather(std::as_bytes(std::span{placed_}));
    for (const auto& of : offsets) {
      ASSERT_EQ(of.size(), placed_.size() * sizeof(std::size_t));
      EXPECT_EQ(std::memcmp(of.data(), placed_.data(), of.size()), 0);
    }
    EXPECT_EQ(heap_.statistics().allocation.all.current, 0);
    heap_.close();
  }

 private:
  std::size_t below(std::size_t end) { return same_() % end; }

  /// Each rank holds its streams up in its own way.
  void delay_some_stream() {
    if (own_() % 3 != 0) return;
    at_.on->launch(streams_[own_() % streams_.size()], [us = own_() % 200] {
      const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(us);
      while (std::chrono::steady_clock::now() < end) std::this_thread::yield();
    });
  }

  void allocate() {
    const auto bytes = static_cast<std::size_t>(std::exp2(static_cast<double>(below(2000)) / 100));
    const auto stream = below(streams_.size());
    symmetric_request request;
    request.tiers = static_cast<tier_policy>(below(4));
    if (request.tiers == tier_policy::device_only) request.tiers = tier_policy::device_first;
    request.may_span = below(4) == 0;
    request.alignment = std::size_t{512} << (below(8) == 0 ? below(12) : 0);
    request.pool = below(5) == 0 ? pools_.back() : pool_id{};
    if (total_ + bytes > 48_MiB) return;
    const random_block made{.offset = heap_.allocate(bytes, streams_[stream], request),
                            .bytes = bytes,
                            .stream = stream,
                            .value = static_cast<std::uint8_t>(own_())};
    for (const random_block& other : live_) {
      EXPECT_TRUE(made.offset + made.bytes <= other.offset ||
                  other.offset + other.bytes <= made.offset);
    }
    EXPECT_EQ(made.offset % request.alignment, 0u);
    at_.on->fill(at(made), std::byte{made.value}, bytes, streams_[stream]);
    total_ += bytes;
    live_.push_back(made);
    placed_.push_back(made.offset);
  }

  void free() {
    if (live_.empty()) return;
    const std::size_t which = below(live_.size());
    const random_block gone = live_[which];
    live_.erase(live_.begin() + static_cast<std::ptrdiff_t>(which));
    // What is there when the stream comes to the free must be what was written at first.
    auto seen = std::make_shared<probe>();
    seen->bytes = std::min(gone.bytes, seen->found.size());
    seen->value = gone.value;
    at_.on->copy(reinterpret_cast<address>(seen->found.data()), at(gone), seen->bytes,
                 streams_[gone.stream]);
    at_.on->launch(streams_[gone.stream], [seen, wrong = wrong_] {
      for (std::size_t i = 0; i < seen->bytes; ++i) *wrong += seen->found[i] != seen->value;
    });
    total_ -= gone.bytes;
    heap_.free(gone.offset);
  }

  /// Another stream rewrites the block, behind the one that owns it.
  void record() {
    if (live_.empty()) return;
    const random_block& of = live_[below(live_.size())];
    const native_stream other = streams_[below(streams_.size())];
    const native_event written = at_.on->create_event(at_.device);
    at_.on->record(written, streams_[of.stream]);
    at_.on->wait(other, written);
    at_.on->fill(at(of), std::byte{of.value}, of.bytes, other);
    at_.on->destroy_event(written);
    heap_.record_stream(of.offset, other);
  }

  void change(std::size_t what) {
    if (what == 97) {
      heap_.trim(below(32) << 20);
    } else if (what == 98 && heap_.region().size() > 0) {
      const std::size_t from = below(heap_.region().size());
      const std::size_t bytes = below(heap_.region().size() - from);
      try {
        heap_.migrate(from, bytes, static_cast<tier>(below(2)));
      } catch (const out_of_memory&) {
        // More than device_limit: nothing has moved, on any rank.
      }
    } else if (what == 99) {
      heap_.compact();
    }
  }

  address at(const random_block& block) const {
    return reinterpret_cast<address>(heap_.local(block.offset));
  }

  const rank_context& at_;
  std::mt19937_64 same_;  ///< what is called: the same on every rank
  std::mt19937_64 own_;   ///< delays and contents: this rank's
  symmetric_heap heap_;
  std::array<native_stream, 4> streams_{};
  std::vector<pool_id> pools_;
  std::vector<random_block> live_;
  std::vector<std::size_t> placed_;
  std::size_t total_ = 0;
  std::shared_ptr<std::atomic<int>> wrong_ = std::make_shared<std::atomic<int>>(0);
};

}  // namespace

void run_random_heap(const rank_context& at, std::size_t count, std::uint64_t seed) {
  random_heap(at, seed).run(count);
}

}  // namespace evmm::test
