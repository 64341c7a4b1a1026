// SPDX-License-Identifier: Apache-2.0
// The pinned host allocator where calls are wrong or fail, and at its end.
#include "tests/unit/pinned_allocator_fixture.hpp"

#include <evmm/allocator/pinned_host_allocator.hpp>
#include <evmm/error.hpp>
#include <evmm/units.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

namespace evmm::test {
namespace {

using ::testing::HasSubstr;

TEST_F(pinned_allocator, unknown_pointers_are_refused_by_value) {
  const auto pinned = make();
  char* const first = static_cast<char*>(pinned->allocate(8192));
  int on_stack = 0;
  for (void* wrong : {static_cast<void*>(first + 1), static_cast<void*>(&on_stack)}) {
    try {
      pinned->free(wrong);
      ADD_FAILURE() << "freed what was not allocated";
    } catch (const invalid_argument& failure) {
      EXPECT_THAT(failure.what(), HasSubstr("cannot free 0x"));
    }
  }
  EXPECT_FALSE(pinned->record(&on_stack, nullptr));
  EXPECT_FALSE(pinned->owns(&on_stack));
  EXPECT_TRUE(pinned->owns(first + 8191));
  pinned->free(first);
  EXPECT_THROW(pinned_host_allocator(on, device_id{9}), invalid_argument);
}

TEST_F(pinned_allocator, a_failure_at_any_call_leaves_it_usable_and_nothing_behind) {
  const auto stream = on->create_stream({0});
  for (const bool registered : {false, true}) {
    const auto before = alive();
    for (std::size_t nth = 0;; ++nth) {
      {
        const auto pinned = make({.use_host_register = registered, .reserve_segment = 64_KiB});
        std::vector<void*> live;
        on->fail_call(nth);
        const auto attempt = [&](std::size_t bytes) {
          const auto counted = pinned->statistics();
          try {
            live.push_back(pinned->allocate(bytes));
          } catch (const error&) {
            const auto after = pinned->statistics();
            // What was freed before may have come back meanwhile.
            EXPECT_LE(after.active_bytes.current, counted.active_bytes.current);
            EXPECT_LE(after.requested_bytes.current, counted.requested_bytes.current);
          }
        };
        const auto release = [&] {
          if (live.empty()) return;
          const auto counted = pinned->statistics();
          pinned->record(live.back(), stream);
          try {
            pinned->free(live.back());
          } catch (const error&) {
            EXPECT_TRUE(pinned->owns(live.back()));
            EXPECT_EQ(pinned->statistics().active_bytes, counted.active_bytes);
            pinned->free(live.back());  // the failure happens once
          }
          live.pop_back();
        };
        attempt(2_MiB);
        attempt(100);
        release();
        release();
        attempt(1_MiB);
        on->synchronize(stream);
        release();
        const bool happened = on->disarm();
        on->synchronize(stream);
        pinned->poll();
        EXPECT_EQ(pinned->statistics().active_requests.current, 0) << "after failing call " << nth;
        EXPECT_EQ(static_cast<std::size_t>(pinned->statistics().allocated_bytes.current),
                  on->alive().pinned_bytes);
        void* const works = pinned->allocate(3_MiB);
        EXPECT_NE(works, nullptr);
        pinned->free(works);
        if (!happened) nth = 1000;
      }
      EXPECT_EQ(alive(), before) << "after failing call " << nth;
      if (nth >= 1000) break;
    }
  }
  on->destroy_stream(stream);
}

TEST_F(pinned_allocator, an_event_that_cannot_be_asked_keeps_its_block) {
  const auto pinned = make();
  const auto stream = on->create_stream({0});
  void* const first = pinned->allocate(1_MiB);
  pinned->record(first, stream);
  pinned->free(first);
  on->synchronize(stream);
  on->fail_call(driver_call::done, 0);
  void* const second = pinned->allocate(1_MiB);
  EXPECT_NE(second, first);
  EXPECT_TRUE(on->disarm());
  EXPECT_EQ(pinned->allocate(1_MiB), first) << "asked again";
  pinned->free(first);
  pinned->free(second);
  on->destroy_stream(stream);
}

TEST_F(pinned_allocator, what_cannot_be_given_back_stays_cached) {
  for (const bool catches : {false, true}) {
    const auto pinned = make({.free_catch_all = catches});
    void* const first = pinned->allocate(1_MiB);
    pinned->free(first);
    on->fail_call(driver_call::free_pinned, 0);
    if (catches) {
      EXPECT_EQ(pinned->empty_cache(), 0u);
    } else {
      EXPECT_THROW(pinned->empty_cache(), driver_error);
    }
    EXPECT_EQ(pinned->allocate(1_MiB), first);
    pinned->free(first);
    EXPECT_EQ(pinned->empty_cache(), 1_MiB);
  }
}

TEST_F(pinned_allocator, its_end_gives_all_back_and_waits_for_streams) {
  const auto before = alive();
  const auto stream = on->create_stream({0});
  std::atomic<bool> ran = false;
  {
    const auto pinned = make();
    void* const first = pinned->allocate(1_MiB);
    static_cast<void>(pinned->allocate(2_MiB));  // lives on, with a warning
    on->launch(stream, [&, first] {
      std::memset(first, 1, 1_MiB);
      ran = true;
    });
    pinned->record(first, stream);
    pinned->free(first);
  }
  EXPECT_TRUE(ran);
  on->destroy_stream(stream);
  EXPECT_EQ(alive(), before);
}

TEST_F(pinned_allocator, a_forked_child_is_refused) {
  auto pinned = make({.background_thread = true});
  void* const first = pinned->allocate(4096);
  const pid_t child = ::fork();
  ASSERT_NE(child, -1);
  if (child == 0) {
    int refused = 0;
    const auto count = [&](const std::function<void()>& call) {
      try {
        call();
      } catch (const invalid_argument&) {
        ++refused;
      }
    };
    count([&] { static_cast<void>(pinned->allocate(1)); });
    count([&] { pinned->free(first); });
    count([&] { pinned->record(first, nullptr); });
    count([&] { pinned->empty_cache(); });
    count([&] { static_cast<void>(pinned->statistics()); });
    pinned.reset();  // waits for no thread that is not there
    ::_exit(refused == 5 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  pinned->free(first);
}

}  // namespace
}  // namespace evmm::test
