// SPDX-License-Identifier: Apache-2.0
// What libevmm_torch.so tells, is told, and keeps: statistics, limits, pools, snapshots, threads.
#include "tests/unit/torch_face.hpp"

#include <evmm/allocator/snapshot.hpp>
#include <evmm/version.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

namespace evmm::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;

TEST_F(torch_face, statistics_have_pytorchs_names) {
  void* const at = allocate(3 * k_mib);
  const json now = statistics();
  for (const char* of :
       {"allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes",
        "active_bytes", "inactive_split_bytes", "requested_bytes"}) {
    for (const char* pool : {"all", "small_pool", "large_pool"}) {
      for (const char* metric : {"current", "peak", "allocated", "freed"}) {
        const std::string name = std::string(of) + "." + pool + "." + metric;
        EXPECT_TRUE(now.contains(name)) << name;
      }
    }
  }
  for (const char* name :
       {"num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc",
        "num_device_free", "max_split_size", "oversize_allocations.current",
        "oversize_segments.peak", "host_tier_bytes", "mapped_bytes"}) {
    EXPECT_TRUE(now.contains(name)) << name;
  }
  EXPECT_EQ(now["allocated_bytes.all.current"], 3 * k_mib);
  EXPECT_EQ(now["allocated_bytes.large_pool.current"], 3 * k_mib);
  free(at);
  EXPECT_EQ(statistics()["allocated_bytes.all.current"], 0);
  EXPECT_GE(statistics()["allocated_bytes.all.peak"], 3 * k_mib);
  EXPECT_EQ(FROM_LIBRARY(evmm_torch_reset_peaks)(0), EVMM_TORCH_OK);
  EXPECT_EQ(statistics()["allocated_bytes.all.peak"], 0);
  EXPECT_GE(statistics()["allocated_bytes.all.freed"], 3 * k_mib);
  EXPECT_EQ(FROM_LIBRARY(evmm_torch_reset_totals)(0), EVMM_TORCH_OK);
  EXPECT_EQ(statistics()["allocated_bytes.all.freed"], 0);
}

TEST_F(torch_face, statistics_are_cut_at_the_buffer) {
  const auto ask = FROM_LIBRARY(evmm_torch_statistics);
  char part[8] = "xxxxxxx";
  const int length = ask(0, part, sizeof part);
  EXPECT_GT(length, 100);
  EXPECT_STREQ(part, "{\"alloc");
  EXPECT_EQ(ask(0, nullptr, 8), EVMM_TORCH_INVALID_ARGUMENT);
  EXPECT_EQ(ask(9, part, sizeof part), EVMM_TORCH_INVALID_ARGUMENT);
}

TEST_F(torch_face, reset_gives_cached_memory_back) {
  free(allocate(30 * k_mib));
  EXPECT_GE(statistics()["reserved_bytes.all.current"], 30 * k_mib);
  FROM_LIBRARY(evmm_torch_reset)();
  EXPECT_EQ(statistics()["reserved_bytes.all.current"], 0);
  free(allocate(30 * k_mib));
  EXPECT_EQ(FROM_LIBRARY(evmm_torch_empty_cache)(0), EVMM_TORCH_OK);
  EXPECT_EQ(statistics()["reserved_bytes.all.current"], 0);
  EXPECT_EQ(FROM_LIBRARY(evmm_torch_empty_cache)(7), EVMM_TORCH_INVALID_ARGUMENT);
}

TEST_F(torch_face, fraction_limits) {
  const auto set = FROM_LIBRARY(evmm_torch_set_fraction);
  set(0.25, 0);
  EXPECT_EQ(allocate(20 * k_mib), nullptr);
  set(2, 0);
  EXPECT_EQ(FROM_LIBRARY(evmm_torch_last_code)(), EVMM_TORCH_INVALID_ARGUMENT);
  set(1, 0);
  void* const at = allocate(20 * k_mib);
  EXPECT_NE(at, nullptr);
  free(at);
}

// As PyTorch calls them: with a pair in registers, and a std::function by value.
TEST_F(torch_face, pools_of_graphs) {
  using pool_name = std::pair<unsigned long long, unsigned long long>;
  using filter = std::function<bool(native_stream)>;
  const auto begin = symbol<void(int, pool_name, filter)>("evmm_torch_begin_allocate_to_pool");
  const auto end = symbol<void(int, pool_name)>("evmm_torch_end_allocate_to_pool");
  const auto release = symbol<void(int, pool_name)>("evmm_torch_release_pool");

  void* const outside = allocate(1000);
  bool asked = false;
  // Larger than what a std::function holds without memory of its own.
  const std::array<std::uint64_t, 8> ballast{1, 2, 3, 4, 5, 6, 7, 8};
  begin(0, {7, 0}, [&asked, ballast](native_stream stream) {
    asked = true;
    return stream == nullptr && ballast[7] == 8;
  });
  EXPECT_THAT(last_error(), IsEmpty());
  void* const inside = allocate(1000);
  EXPECT_TRUE(asked);
  end(0, {7, 0});
  void* const after = allocate(1000);
  EXPECT_EQ(segment_of(outside).pool, segment_of(after).pool);
  EXPECT_NE(segment_of(inside).pool, segment_of(outside).pool);

  EXPECT_EQ(segment_of(inside).pool, (pool_number{7, 0})) << "as PyTorch calls it";
  EXPECT_EQ(statistics()["reserved_bytes_by_private_pools.7_0.all.current"], 2 * k_mib);

  // A second graph that shares the pool, and reuses what the first one freed.
  free(inside);
  begin(0, {7, 0}, [](native_stream) { return true; });
  void* const shared = allocate(1000);
  end(0, {7, 0});
  EXPECT_EQ(shared, inside);
  // A pool beside it.
  begin(0, {8, 0}, [](native_stream) { return true; });
  void* const other = allocate(1000);
  end(0, {8, 0});
  EXPECT_NE(segment_of(other).pool, segment_of(shared).pool);
  EXPECT_THAT(last_error(), IsEmpty());

  free(shared);
  free(other);
  release(0, {7, 0});
  release(0, {7, 0});
  release(0, {8, 0});
  EXPECT_THAT(last_error(), IsEmpty());
  release(0, {7, 0});
  EXPECT_EQ(FROM_LIBRARY(evmm_torch_last_code)(), EVMM_TORCH_INVALID_ARGUMENT);
  end(0, {9, 0});
  EXPECT_THAT(last_error(), HasSubstr("pool (9, 0)"));
  begin(0, {7, 0}, nullptr);
  EXPECT_THAT(last_error(), HasSubstr("filter"));
  free(outside);
  free(after);
  FROM_LIBRARY(evmm_torch_reset)();
  EXPECT_EQ(statistics()["reserved_bytes.all.current"], 0);
}

TEST_F(torch_face, snapshots_have_the_history) {
  const auto record = FROM_LIBRARY(evmm_torch_record_history);
  ASSERT_EQ(record(-1, "all", 0, 100), EVMM_TORCH_OK);
  void* const at = allocate(5000);
  void* const other = allocate(5000, 1);
  free(at);
  const allocator_snapshot both = snapshot(-1);
  ASSERT_EQ(both.device_traces.size(), 2u);
  ASSERT_GE(both.device_traces[0].size(), 2u);
  EXPECT_FALSE(both.device_traces[1].empty());
  EXPECT_EQ(both.device_traces[0].end()[-2].action, trace_action::free_completed);
  EXPECT_EQ(both.device_traces[0].back().action, trace_action::snapshot);
  EXPECT_EQ(segment_of(other).device, 1);
  EXPECT_EQ(record(0, "off", 0, 100), EVMM_TORCH_OK);
  EXPECT_EQ(record(-1, "off", 0, 100), EVMM_TORCH_OK);
  EXPECT_TRUE(snapshot(1).device_traces.back().empty());
  free(other, 1);
  EXPECT_EQ(record(0, "everything", 0, 100), EVMM_TORCH_INVALID_ARGUMENT);
  EXPECT_THAT(last_error(), HasSubstr("off, state, alloc or all"));
  EXPECT_EQ(record(0, nullptr, 0, 100), EVMM_TORCH_INVALID_ARGUMENT);
  EXPECT_EQ(FROM_LIBRARY(evmm_torch_snapshot)(0, "/nowhere/at/all"), EVMM_TORCH_DRIVER_ERROR);
  EXPECT_THAT(last_error(), AllOf(HasSubstr("/nowhere/at/all"), HasSubstr("No such file")));
  EXPECT_EQ(FROM_LIBRARY(evmm_torch_snapshot)(0, nullptr), EVMM_TORCH_INVALID_ARGUMENT);
}

TEST_F(torch_face, configure_says_what_is_wrong) {
  const auto configure = FROM_LIBRARY(evmm_torch_configure);
  EXPECT_EQ(configure("max_split_size_mbb:40"), EVMM_TORCH_INVALID_ARGUMENT);
  EXPECT_THAT(last_error(), HasSubstr("max_split_size_mb"));
  EXPECT_EQ(configure("garbage_collection_threshold:7"), EVMM_TORCH_INVALID_ARGUMENT);
  EXPECT_EQ(configure(nullptr), EVMM_TORCH_INVALID_ARGUMENT);
  allocate(0);  // the device is in use
  EXPECT_EQ(configure("backend:cudaMallocAsync"), EVMM_TORCH_INVALID_ARGUMENT);
  EXPECT_EQ(configure("max_split_size_mb:40"), EVMM_TORCH_OK) << last_error();
  EXPECT_EQ(statistics()["max_split_size"], 40_MiB);
}

class torch_face_tiers : public torch_face {
 protected:
  static std::int64_t host_bytes() { return statistics()["host_tier_bytes"]; }
};

TEST_F(torch_face_tiers, a_pool_spans_the_device_and_the_host) {
  const auto before = host_bytes();
  void* const held = allocate(32 * k_mib);
  for (const ssize_t mib : {40, 200}) {  // 200: more than the device ever had
    void* const at = FROM_LIBRARY(evmm_torch_host_tier_alloc)(mib * k_mib, 0, nullptr);
    ASSERT_NE(at, nullptr) << last_error();
    EXPECT_GE(host_bytes() - before, (mib - 32) * k_mib);
    EXPECT_EQ(allocate(40 * k_mib), nullptr) << "other allocations are not routed";
    FROM_LIBRARY(evmm_torch_host_tier_free)(at, mib * k_mib, 0, nullptr);
    EXPECT_EQ(host_bytes(), before);
  }
  free(held);
}

TEST_F(torch_face_tiers, a_request_that_fails_counts_once) {
  const std::int64_t before = statistics()["num_ooms"];
  EXPECT_EQ(FROM_LIBRARY(evmm_torch_host_tier_alloc)(ssize_t{1} << 50, 0, nullptr), nullptr);
  EXPECT_EQ(FROM_LIBRARY(evmm_torch_last_code)(), EVMM_TORCH_OUT_OF_MEMORY);
  EXPECT_EQ(statistics()["num_ooms"], before + 1);
}

TEST_F(torch_face_tiers, a_pool_of_the_host_alone) {
  const auto before = host_bytes();
  void* const at = FROM_LIBRARY(evmm_torch_host_only_alloc)(4 * k_mib, 0, nullptr);
  ASSERT_NE(at, nullptr) << last_error();
  EXPECT_GE(host_bytes() - before, 4 * k_mib);
  FROM_LIBRARY(evmm_torch_host_only_free)(at, 4 * k_mib, 0, nullptr);
  EXPECT_EQ(host_bytes(), before);
  FROM_LIBRARY(evmm_torch_host_only_free)(nullptr, 0, 0, nullptr);
  EXPECT_EQ(FROM_LIBRARY(evmm_torch_host_only_alloc)(-1, 0, nullptr), nullptr);
  EXPECT_EQ(FROM_LIBRARY(evmm_torch_last_code)(), EVMM_TORCH_INVALID_ARGUMENT);
}

TEST_F(torch_face_tiers, the_calling_threads_allocations) {
  const auto begin = FROM_LIBRARY(evmm_torch_begin_tiers);
  const auto end = FROM_LIBRARY(evmm_torch_end_tiers);
  ASSERT_EQ(begin(0, EVMM_TORCH_HOST_ONLY), EVMM_TORCH_OK);
  void* const on_host = allocate(4 * k_mib);
  void* beside = nullptr;
  std::thread([&] {
    beside = allocate(4 * k_mib);
    EXPECT_EQ(end(0, EVMM_TORCH_HOST_ONLY), EVMM_TORCH_INVALID_ARGUMENT) << "another's";
  }).join();
  ASSERT_EQ(begin(0, EVMM_TORCH_DEVICE_THEN_HOST), EVMM_TORCH_OK);
  void* const spanning = allocate(80 * k_mib);
  EXPECT_EQ(end(0, EVMM_TORCH_HOST_ONLY), EVMM_TORCH_INVALID_ARGUMENT) << "not the last";
  EXPECT_EQ(end(0, EVMM_TORCH_DEVICE_THEN_HOST), EVMM_TORCH_OK);
  void* const again = allocate(4 * k_mib);
  EXPECT_EQ(end(0, EVMM_TORCH_HOST_ONLY), EVMM_TORCH_OK);
  void* const after = allocate(4 * k_mib);
  EXPECT_EQ(segment_of(on_host).where, tier::host);
  EXPECT_EQ(segment_of(again).where, tier::host);
  EXPECT_EQ(segment_of(beside).where, tier::device);
  EXPECT_EQ(segment_of(after).where, tier::device);
  EXPECT_NE(spanning, nullptr);
  for (void* const at : {on_host, beside, spanning, again, after}) free(at);
  EXPECT_EQ(begin(0, 2), EVMM_TORCH_INVALID_ARGUMENT);
  EXPECT_EQ(end(0, EVMM_TORCH_HOST_ONLY), EVMM_TORCH_INVALID_ARGUMENT);
}

TEST_F(torch_face, threads) {
  constexpr int k_threads = 4;
  std::vector<std::thread> threads;
  for (int t = 0; t < k_threads; ++t) {
    threads.emplace_back([t] {
      std::vector<void*> held;
      for (int i = 0; i < 400; ++i) {
        const ssize_t bytes = 512 + (i * 7919 + t * 104729) % (k_mib / 2);
        if (void* const at = allocate(bytes, t % 2)) {
          *static_cast<int*>(at) = t;
          held.push_back(at);
        }
        if (held.size() > 8) {
          EXPECT_EQ(*static_cast<int*>(held.front()), t);
          free(held.front(), t % 2);
          held.erase(held.begin());
        }
        if (i % 100 == 50) FROM_LIBRARY(evmm_torch_empty_cache)(t % 2);
        if (i % 100 == 75) {
          FROM_LIBRARY(evmm_torch_host_only_free)
          (FROM_LIBRARY(evmm_torch_host_only_alloc)(k_mib, t % 2, nullptr), k_mib, t % 2, nullptr);
        }
      }
      for (void* const at : held) free(at, t % 2);
    });
  }
  for (auto& thread : threads) thread.join();
  for (const int device : {0, 1}) {
    EXPECT_EQ(statistics(device)["allocation.all.current"], 0);
    EXPECT_EQ(statistics(device)["host_tier_bytes"], 0);
  }
}

/// What a thread keeps, and frees when it ends.
struct kept_by_a_thread {
  static inline std::string said;
  void* at = nullptr;
  ~kept_by_a_thread() {
    free(at);
    free(static_cast<void*>(&said));
    said = last_error();
  }
};

TEST_F(torch_face, a_thread_frees_as_late_as_it_likes) {
  std::thread([] {
    static thread_local kept_by_a_thread kept;  // made before the thread's first error
    kept.at = nullptr;
    EXPECT_EQ(allocate(-1), nullptr);
    kept.at = allocate(k_mib);
    EXPECT_EQ(allocate(-1), nullptr);
  }).join();
  EXPECT_THAT(kept_by_a_thread::said, HasSubstr("it is no live allocation"));
  EXPECT_EQ(statistics()["allocation.all.current"], 0);
}

TEST_F(torch_face, a_forked_child_gets_nothing_and_frees_nothing) {
  void* const at = allocate(1000);
  ASSERT_NE(at, nullptr);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    int wrong = 0;
    wrong |= allocate(1000) == nullptr ? 0 : 1;
    wrong |= FROM_LIBRARY(evmm_torch_last_code)() == EVMM_TORCH_INVALID_ARGUMENT ? 0 : 2;
    free(at);
    wrong |= FROM_LIBRARY(evmm_torch_last_code)() == EVMM_TORCH_OK ? 0 : 4;
    ::_exit(wrong);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  free(at);
  EXPECT_THAT(last_error(), IsEmpty());
}

}  // namespace
}  // namespace evmm::test
