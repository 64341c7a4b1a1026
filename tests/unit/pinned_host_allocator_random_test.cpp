// SPDX-License-Identifier: Apache-2.0
// The pinned host allocator against a model, and under several threads.
#include "tests/unit/pinned_allocator_fixture.hpp"

#include <evmm/allocator/pinned_host_allocator.hpp>
#include <evmm/error.hpp>
#include <evmm/units.hpp>

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

namespace evmm::test {
namespace {

/// Random calls; the model knows what is live and what a held stream still uses.
TEST_F(pinned_allocator, random_calls_never_hand_out_what_is_in_use) {
  struct piece {
    std::size_t bytes = 0;
    unsigned char mark = 0;
    bool used = false;  ///< by the stream
  };
  for (const unsigned seed : {1U, 2U, 3U, 4U}) {
    const auto before = alive();
    const auto stream = on->create_stream({0});
    {
      const auto pinned =
          make({.reserve_segment = seed % 2 == 0 ? 256_KiB : 0,
                .max_round_threshold = seed > 2 ? 64_KiB : 0,
                .max_cached_size = seed == 3 ? std::optional(1_MiB) : std::nullopt});
      std::mt19937 random(seed);
      const auto below = [&](std::size_t limit) {
        return static_cast<std::size_t>(random()) % limit;
      };
      std::map<address, piece> live;
      std::map<address, piece> held;  ///< freed, and the stream has not passed
      auto gate = std::make_unique<stream_gate>(*on, stream);
      const auto overlaps = [](const std::map<address, piece>& pieces, address first,
                               std::size_t bytes) {
        const auto next = pieces.lower_bound(first + bytes);
        return next != pieces.begin() &&
               std::prev(next)->first + std::prev(next)->second.bytes > first;
      };
      const auto check = [&](const std::pair<const address, piece>& one) {
        const auto* const bytes = reinterpret_cast<const unsigned char*>(one.first);
        EXPECT_EQ(bytes[0], one.second.mark);
        EXPECT_EQ(bytes[one.second.bytes - 1], one.second.mark);
      };
      for (int step = 0; step < 4000; ++step) {
        const auto what = below(100);
        if (what < 50 && live.size() < 60) {
          const std::size_t bytes = 1 + below(below(4) == 0 ? 2_MiB : 40_KiB);
          try {
            const address got = at(pinned->allocate(bytes));
            ASSERT_FALSE(overlaps(live, got, bytes)) << "step " << step;
            ASSERT_FALSE(overlaps(held, got, bytes)) << "too early, step " << step;
            const auto mark = static_cast<unsigned char>(step);
            std::memset(reinterpret_cast<void*>(got), mark, bytes);
            live[got] = {bytes, mark};
          } catch (const out_of_memory&) {
            ADD_FAILURE() << "64 MiB are enough";
          }
        } else if (what < 60 && !live.empty()) {
          auto one = std::next(live.begin(), static_cast<long>(below(live.size())));
          EXPECT_TRUE(pinned->record(reinterpret_cast<void*>(one->first + below(one->second.bytes)),
                                     stream));
          one->second.used = true;
        } else if (what < 96 && !live.empty()) {
          auto one = std::next(live.begin(), static_cast<long>(below(live.size())));
          check(*one);
          pinned->free(reinterpret_cast<void*>(one->first));
          if (one->second.used) held.insert(*one);
          live.erase(one);
        } else if (what < 98) {
          gate->open();
          on->synchronize(stream);
          held.clear();
          gate = std::make_unique<stream_gate>(*on, stream);
        } else {
          pinned->empty_cache();
        }
        std::size_t requested = 0;
        for (const auto& one : live) requested += one.second.bytes;
        const auto counted = pinned->statistics();
        ASSERT_EQ(static_cast<std::size_t>(counted.requested_bytes.current), requested);
        ASSERT_EQ(static_cast<std::size_t>(counted.allocated_bytes.current),
                  on->alive().pinned_bytes);
        ASSERT_LE(counted.active_bytes.current, counted.allocated_bytes.current);
        ASSERT_GE(static_cast<std::size_t>(counted.active_requests.current), live.size());
      }
      for (const auto& one : live) check(one);
      gate.reset();
      on->synchronize(stream);
      for (const auto& one : live) pinned->free(reinterpret_cast<void*>(one.first));
      on->synchronize(stream);
      pinned->poll();
      EXPECT_EQ(pinned->statistics().active_bytes.current, 0);
      pinned->empty_cache();
      EXPECT_LE(on->alive().pinned, 1u) << "but for the reserve";
    }
    on->destroy_stream(stream);
    EXPECT_EQ(alive(), before);
  }
}

TEST_F(pinned_allocator, threads_do_not_disturb_each_other) {
  for (const bool background : {false, true}) {
    const auto pinned = make(
        {.background_thread = background, .reserve_segment = 64_KiB, .max_cached_size = 256_KiB});
    constexpr int k_threads = 4;
    std::atomic<int> wrong = 0;
    std::vector<std::thread> threads;
    for (int t = 0; t < k_threads; ++t) {
      threads.emplace_back([&, t] {
        const auto stream = on->create_stream({0});
        std::mt19937 random(static_cast<unsigned>(t));
        for (int round = 0; round < 300; ++round) {
          const std::size_t bytes = 1 + random() % (round % 8 == 0 ? 512_KiB : 8_KiB);
          auto* const mine = static_cast<unsigned char*>(pinned->allocate(bytes));
          const auto mark = static_cast<unsigned char>(1 + t);
          std::memset(mine, mark, bytes);
          if (round % 3 != 0) {
            // The stream writes after the free: nobody else may have the block by then.
            on->launch(stream, [&wrong, mine, mark, bytes] {
              if (mine[0] != mark || mine[bytes - 1] != mark) ++wrong;
              std::memset(mine, mark, bytes);
            });
            pinned->record(mine, stream);
          } else if (mine[0] != mark || mine[bytes - 1] != mark) {
            ++wrong;
          }
          pinned->free(mine);
          if (round % 64 == 0) pinned->empty_cache();
        }
        on->synchronize(stream);
        pinned->poll();
        on->destroy_stream(stream);
      });
    }
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(wrong, 0);
    while (pinned->statistics().active_requests.current != 0) pinned->poll();
    EXPECT_EQ(pinned->statistics().active_bytes.current, 0);
  }
}

}  // namespace
}  // namespace evmm::test
