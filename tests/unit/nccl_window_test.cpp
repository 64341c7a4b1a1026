// SPDX-License-Identifier: Apache-2.0
#include "tests/support/forwarding_driver.hpp"
#include "tests/support/nccl_ranks.hpp"
#include "tests/support/scoped_capture.hpp"

#include <evmm/comm/symmetric_buffer.hpp>
#include <evmm/comm/symmetric_heap.hpp>
#include <evmm/error.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <thread>

namespace evmm::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

/// D2 D4 in MiB, on a communicator.
struct two_device_segments {
  explicit two_device_segments(const rank_context& at)
      : region(at.make()), on(at.ranks, at.on, {}) {
    region.grow(tier::device, 2_MiB);
    region.grow(tier::device, 4_MiB);
  }
  symmetric_region region;
  nccl_communicator on;
};

/// Versions that map the first of several handles, refuse several, and take them.
class nccl_versions : public testing::TestWithParam<int> {
 protected:
  bool several() const { return GetParam() >= 23003; }
  bool peers() const { return GetParam() >= 22900; }
};
INSTANTIATE_TEST_SUITE_P(versions, nccl_versions, testing::Values(22809, 22907, 23007),
                         [](const auto& info) { return std::to_string(info.param); });

TEST_P(nccl_versions, a_window_covers_every_segment) {
  const nccl_fixture fake({.version = GetParam()});
  run_nccl_ranks(2, [&](const rank_context& at) {
    two_device_segments made(at);
    const nccl_window window(made.on, made.region, k_whole);
    EXPECT_EQ(text_of(window.pieces()), several() ? "0+6" : "0+2 2+4");
    const nccl_place inside = window.at(3_MiB);
    EXPECT_EQ(inside.offset, several() ? 3_MiB : 1_MiB);
    EXPECT_EQ(inside.bytes, 3_MiB);
    EXPECT_EQ(inside.window == window.at(0).window, several());
    EXPECT_THAT(thrown_by([&] { (void)window.at(6_MiB); }), HasSubstr("offset 6291456"));
    if (peers()) {
      expect_peers_seen(made.on, made.region, window, 1);
    } else {
      EXPECT_THAT(thrown_by([&] { (void)window.peer({0}, 0); }),
                  AllOf(StartsWith("unsupported"), HasSubstr("2.29.0")));
    }
  });
}

TEST_P(nccl_versions, host_segments_are_refused_or_registered) {
  const nccl_fixture fake({.version = GetParam()});
  run_nccl_ranks(2, [&](const rank_context& at) {
    two_device_segments made(at);
    // On one rank only: what is refused depends on all of them.
    made.region.grow(at.ranks->rank() == rank_id{1} ? tier::host : tier::device, 2_MiB);
    if (several()) {
      const nccl_window window(made.on, made.region, k_whole);
      EXPECT_EQ(text_of(window.pieces()), "0+8");
      expect_peers_seen(made.on, made.region, window, 2);
    } else {
      EXPECT_THAT(
          thrown_by_all(*at.ranks, [&] { nccl_window(made.on, made.region); }),
          AllOf(StartsWith("unsupported: rank 0: segment 2 (2.0 MiB at 6.0 MiB) is HOST_NUMA on "
                           "rank 1"),
                HasSubstr("2.30.3")));
    }
    const nccl_window signals(made.on, made.region, {.device_only = true, .kernels_only = true});
    EXPECT_EQ(text_of(signals.pieces()), several() ? "0+6" : "0+2 2+4");
    EXPECT_THAT(thrown_by([&] { (void)signals.at(7_MiB); }), HasSubstr("device_only"));
  });
}

TEST_P(nccl_versions, follows_every_change) {
  const nccl_fixture fake({.version = GetParam()});
  run_nccl_ranks(3, [&](const rank_context& at) {
    two_device_segments made(at);
    const nccl_window window(made.on, made.region, k_whole);
    const nccl_window first(made.on, made.region, {.bytes = 2_MiB},
                            nccl_window::offsets::symmetric);
    std::uint64_t seed = 10;
    const auto expect = [&](const std::string& joined, const std::string& each) {
      EXPECT_EQ(window.why_down(), "");
      EXPECT_EQ(text_of(window.pieces()), several() ? joined : each);
      expect_peers_seen(made.on, made.region, window, ++seed);
    };
    const auto* const kept = first.at(0).window;
    made.region.grow(tier::device, 2_MiB);
    expect("0+8", "0+2 2+4 6+2");
    made.region.shrink(2_MiB);
    expect("0+6", "0+2 2+4");
    if (several()) {
      made.region.migrate(1, tier::host);
      expect("0+6", "");
      made.region.migrate(1, tier::device);
      expect("0+6", "");
    }
    made.region.grow(tier::device, 2_MiB);
    EXPECT_EQ(made.region.compact({}, 1), 2u);
    expect("0+8", "0+2 2+6");
    EXPECT_EQ(first.at(0).window, kept) << "nothing touched it";
    made.region.discard(contents::backup, {}, 1, 1);
    EXPECT_THAT(window.why_down(), AllOf(HasSubstr("discarded"), HasSubstr("restore()")));
    EXPECT_THAT(thrown_by([&] { (void)window.at(0); }), HasSubstr("is down"));
    EXPECT_EQ(first.at(0).window, kept);
    made.region.restore();
    expect("0+8", "0+2 2+6");
    EXPECT_EQ(first.at(0).window, kept);
    made.region.shrink(8_MiB);
    EXPECT_EQ(text_of(window.pieces()), "");
    EXPECT_EQ(window.why_down(), "") << "there is nothing to register";
    EXPECT_THAT(first.why_down(), HasSubstr("ends past"));
    made.region.grow(tier::device, 4_MiB);
    expect("0+4", "0+4");
    EXPECT_EQ(first.why_down(), "");
  });
}

// What NCCL's collectives would map of several segments in one is not all of it.
TEST_P(nccl_versions, a_window_for_collectives_ends_where_its_segment_does) {
  const nccl_fixture fake({.version = GetParam()});
  run_nccl_ranks(2, [](const rank_context& at) {
    two_device_segments made(at);
    const nccl_window window(made.on, made.region);
    EXPECT_EQ(text_of(window.pieces()), "0+2 2+4");
    EXPECT_EQ(window.at(3_MiB).offset, 1_MiB);
    const auto* const first = window.at(0).window;
    const nccl_pin graph = window.pin();
    made.region.grow(tier::device, 2_MiB);
    EXPECT_EQ(text_of(window.pieces()), "0+2 2+4 6+2");
    EXPECT_EQ(window.at(0).window, first) << "what is there stays";
    expect_peers_seen(made.on, made.region, window, 1);
  });
}

TEST(nccl_window, host_memory_under_it_takes_it_down_where_nccl_cannot_have_it) {
  const nccl_fixture fake({.version = 22809});
  run_nccl_ranks(2, [](const rank_context& at) {
    two_device_segments made(at);
    const nccl_window window(made.on, made.region, k_whole);
    const nccl_window devices(made.on, made.region, {.device_only = true});
    made.region.migrate(0, at.ranks->rank() == rank_id{0} ? tier::host : tier::device);
    EXPECT_EQ(made.region.segments({0})[0].where.kind, tier::host) << "the change holds";
    EXPECT_THAT(window.why_down(), AllOf(HasSubstr("HOST_NUMA on rank 0"), HasSubstr("2.30.3")));
    EXPECT_EQ(text_of(devices.pieces()), "2+4");
    made.region.migrate(0, tier::device);
    EXPECT_EQ(text_of(window.pieces()), "0+2 2+4");
    EXPECT_EQ(text_of(devices.pieces()), "0+2 2+4");
  });
}

TEST_P(nccl_versions, a_pinned_window_forbids_what_would_take_it_down) {
  const nccl_fixture fake({.version = GetParam()});
  run_nccl_ranks(2, [&](const rank_context& at) {
    two_device_segments made(at);
    const nccl_window window(made.on, made.region, k_whole);
    const nccl_window second(made.on, made.region, {.offset = 2_MiB, .bytes = 4_MiB});
    const auto* const handle = window.at(0).window;
    // Rank 1 alone has a graph: for the others the change is off as well.
    std::optional<nccl_pin> pin;
    if (at.ranks->rank() == rank_id{1}) pin = window.pin();
    const auto refused =
        AllOf(StartsWith("invalid_argument: rank 1: "), HasSubstr("pinned"), HasSubstr("pin()"));
    const auto before = layout(made.region);
    EXPECT_THAT(thrown_by_all(*at.ranks, [&] { made.region.shrink(4_MiB); }), refused);
    EXPECT_THAT(thrown_by_all(*at.ranks, [&] { made.region.migrate(0, tier::host); }), refused);
    EXPECT_THAT(thrown_by_all(*at.ranks, [&] { made.region.discard(contents::drop); }), refused);
    EXPECT_THAT(thrown_by_all(*at.ranks, [&] { made.region.compact(); }), refused);
    const auto said = thrown_by_all(*at.ranks, [&] { made.region.grow(tier::device, 2_MiB); });
    if (several()) {
      EXPECT_THAT(said, refused) << "the window would have to grow";
      EXPECT_EQ(layout(made.region), before);
    } else {
      EXPECT_EQ(said, "");
    }
    EXPECT_EQ(window.at(0).window, handle);
    pin.reset();
    made.region.grow(tier::device, 2_MiB);
    EXPECT_EQ(window.why_down(), "");
  });
}

TEST(nccl_window, user_buffers_follow_too_and_leave_host_segments_out) {
  const nccl_fixture fake({.version = 22809});
  run_nccl_ranks(2, [](const rank_context& at) {
    two_device_segments made(at);
    made.region.grow(tier::host, 2_MiB);
    const nccl_user_buffer buffer(made.on, made.region);
    EXPECT_EQ(text_of(buffer.pieces()), "0+2 2+4");
    made.region.migrate(2, tier::device);
    EXPECT_EQ(text_of(buffer.pieces()), "0+2 2+4 6+2");
    const nccl_pin pin = buffer.pin();
    EXPECT_THAT(thrown_by_all(*at.ranks, [&] { made.region.shrink(2_MiB); }), HasSubstr("pinned"));
    made.region.grow(tier::device, 2_MiB);
    EXPECT_EQ(text_of(buffer.pieces()), "0+2 2+4 6+2 8+2");
  });
}

TEST(nccl_window, says_no_where_nccl_says_nothing) {
  const nccl_fixture fake({.version = 23007, .null_windows = 1});
  ::setenv("NCCL_LOCAL_REGISTER", "0", 1);
  run_nccl_ranks(2, [](const rank_context& at) {
    two_device_segments made(at);
    EXPECT_THAT(thrown_by_all(*at.ranks, [&] { nccl_window(made.on, made.region); }),
                AllOf(StartsWith("unsupported"), HasSubstr("registered nothing"),
                      HasSubstr("NCCL_CUMEM_ENABLE")));
    EXPECT_THAT(thrown_by_all(*at.ranks, [&] { nccl_user_buffer(made.on, made.region); }),
                AllOf(StartsWith("unsupported"), HasSubstr("NCCL_LOCAL_REGISTER")));
    EXPECT_NE(made.on.get(), nullptr) << "the communicator is as good as before";
  });
  ::unsetenv("NCCL_LOCAL_REGISTER");
}

TEST(nccl_window, what_the_environment_forbids_is_refused_by_name) {
  const nccl_fixture fake({.version = 23007});
  ::setenv("NCCL_ELASTIC_BUFFER_REGISTER", "0", 1);
  run_nccl_ranks(2, [](const rank_context& at) {
    two_device_segments made(at);
    made.region.grow(tier::host, 2_MiB);
    EXPECT_THAT(thrown_by_all(*at.ranks, [&] { nccl_window(made.on, made.region); }),
                AllOf(StartsWith("unsupported"), HasSubstr("NCCL_ELASTIC_BUFFER_REGISTER=0")));
  });
  ::unsetenv("NCCL_ELASTIC_BUFFER_REGISTER");
}

TEST(nccl_window, ranges_are_checked) {
  const nccl_fixture fake({.version = 23007});
  run_nccl_ranks(2, [](const rank_context& at) {
    two_device_segments made(at);
    const auto refusal = [&](const nccl_range& range) {
      return thrown_by_all(*at.ranks, [&] { nccl_window(made.on, made.region, range); });
    };
    EXPECT_THAT(refusal({.offset = ~std::size_t{0}, .bytes = 2}),
                AllOf(StartsWith("invalid_argument"), HasSubstr("pass the end of addresses")));
    EXPECT_THAT(refusal({.offset = 2_MiB, .bytes = 8_MiB}),
                AllOf(HasSubstr("8.0 MiB at 2.0 MiB"), HasSubstr("6.0 MiB"), HasSubstr("grow")));
    const nccl_window part(made.on, made.region, {.offset = 2_MiB, .bytes = 1_MiB});
    EXPECT_EQ(part.at(2_MiB).bytes, 1_MiB);
    const nccl_window later(made.on, made.region, {.offset = 6_MiB});
    EXPECT_EQ(later.pieces().size(), 0u);
    made.region.grow(tier::device, 2_MiB);
    EXPECT_EQ(text_of(later.pieces()), "6+2");
  });
}

TEST_P(nccl_versions, a_window_over_a_buffer_of_a_heap_holds_it_wherever_it_lies) {
  const nccl_fixture fake({.version = GetParam()});
  run_nccl_ranks(2, [&](const rank_context& at) {
    nccl_communicator on(at.ranks, at.on);
    {
      symmetric_heap heap(at.make(), {.growth_step = 2_MiB});
      const symmetric_buffer<char> first(heap, 1000);
      const nccl_window all(on, heap.region(), k_whole);
      const symmetric_buffer<char> second(heap, 3000);
      const nccl_window one(on, heap.region(), {.offset = second.offset(), .bytes = 3000});
      EXPECT_EQ(second.offset(), 1024u);
      ASSERT_EQ(one.pieces().size(), 1u);
      EXPECT_EQ(one.pieces()[0].offset, 0u) << "where its segment starts";
      EXPECT_EQ(one.pieces()[0].bytes, 4096u);
      EXPECT_EQ(one.at(second.offset()).offset, second.offset());

      // A heap that is full grows, with its windows.
      const symmetric_buffer<char> large(heap, 3_MiB);
      EXPECT_EQ(text_of(all.pieces()), several() ? "0+4" : "0+2 2+2");
      EXPECT_EQ(all.at(large.offset() + 3_MiB - 1).bytes % 512, 1u);
      const nccl_window across(
          on, heap.region(),
          {.offset = large.offset(), .bytes = large.bytes(), .kernels_only = true});
      EXPECT_NE(across.at(large.offset()).window, nullptr);
      EXPECT_NE(across.at(large.offset() + 3_MiB - 1).window, nullptr);
      expect_peers_seen(on, heap.region(), all, 1);
      // Where it lies in a larger segment then, it is found there.
      heap.compact();
      EXPECT_EQ(across.why_down(), "");
      EXPECT_EQ(one.why_down(), "");
      EXPECT_EQ(one.at(second.offset()).offset, second.offset());
      expect_peers_seen(on, heap.region(), all, 2);
      if (several()) {
        heap.migrate(large.offset(), large.bytes(), tier::host);
        EXPECT_EQ(across.why_down(), "");
        expect_peers_seen(on, heap.region(), all, 3);
      }
      const nccl_pin pinned = all.pin();
      if (several()) {
        EXPECT_THAT(thrown_by_all(*at.ranks, [&] { (void)heap.allocate(8_MiB); }),
                    HasSubstr("pinned"));
      }
    }
    on.close();
  });
}

TEST(nccl_window, what_kernels_cannot_follow_is_not_told) {
  const nccl_fixture fake({.version = 23007});
  run_nccl_ranks(2, [](const rank_context& outer) {
    rank_context at = outer;
    at.on = std::make_shared<unreached>(outer.on);
    two_device_segments made(at);
    const nccl_window window(made.on, made.region, k_whole);
    EXPECT_EQ(text_of(window.pieces()), "0+6") << "collectives have it";
    EXPECT_THAT(thrown_by([&] { (void)window.at(3_MiB); }),
                AllOf(StartsWith("unsupported"), HasSubstr("NCCL 2.30.7"), HasSubstr("fault")));
    EXPECT_THAT(thrown_by([&] { (void)window.at(6_MiB); }), StartsWith("invalid_argument"));
  });
}

TEST(nccl_window, other_bootstraps_and_captures_are_refused) {
  const nccl_fixture fake({.version = 23007});
  run_nccl_ranks(1, [](const rank_context& at) {
    two_device_segments made(at);
    const auto alone = make_thread_bootstraps(1)[0];
    nccl_communicator other(alone, at.on);
    EXPECT_THAT(thrown_by([&] { nccl_window(other, made.region); }),
                HasSubstr("different bootstraps"));
    const native_stream stream = at.on->create_stream({0});
    {
      const scoped_capture capture(*at.on, stream);
      EXPECT_THAT(thrown_by([&] {
                    nccl_window(made.on, made.region, {.streams = std::span{&stream, 1}});
                  }),
                  AllOf(StartsWith("invalid_argument"), HasSubstr("captured")));
    }
    at.on->destroy_stream(stream);
  });
}

TEST(nccl_window, ranks_with_other_windows_cannot_change_the_region) {
  const nccl_fixture fake({.version = 23007});
  run_nccl_ranks(2, [](const rank_context& at) {
    two_device_segments made(at);
    auto window = std::make_unique<nccl_window>(made.on, made.region);
    if (at.ranks->rank() == rank_id{1}) window.reset();
    EXPECT_THAT(thrown_by_all(*at.ranks, [&] { made.region.grow(tier::device, 2_MiB); }),
                AllOf(StartsWith("invalid_argument: grow by 2.0 MiB"), HasSubstr("rank 1"),
                      HasSubstr("windows")));
    window.reset();
    made.region.grow(tier::device, 2_MiB);
  });
}

TEST(nccl_window, ranks_with_other_ranges_are_told_before_nccl_is) {
  const nccl_fixture fake({.version = 23007});
  run_nccl_ranks(
      2,
      [](const rank_context& at) {
        two_device_segments made(at);
        const bool odd = at.ranks->rank() == rank_id{1};
        using offsets = nccl_window::offsets;
        const auto refusal = [&](const nccl_range& mine, offsets used) {
          return thrown_by_all(*at.ranks, [&] { nccl_window(made.on, made.region, mine, used); });
        };
        const std::string says =
            "invalid_argument: the range of an nccl_window differs between "
            "ranks: rank 0 gave ";
        EXPECT_THAT(refusal({.bytes = odd ? 4_MiB : 2_MiB}, offsets::any),
                    StartsWith(says + "2097152 bytes at 0; rank 1 gave 4194304 bytes at 0"));
        EXPECT_THAT(refusal({.kernels_only = odd}, offsets::any),
                    StartsWith(says + "0 bytes at 0; rank 1 gave 0 bytes at 0, kernels_only"));
        EXPECT_THAT(refusal({.device_only = odd}, offsets::any),
                    StartsWith(says + "0 bytes at 0; rank 1 gave 0 bytes at 0, device_only"));
        EXPECT_THAT(
            refusal({}, odd ? offsets::symmetric : offsets::any),
            StartsWith(says + "0 bytes at 0; rank 1 gave 0 bytes at 0, offsets::symmetric"));
        EXPECT_NE(made.on.get(), nullptr);
        const nccl_window window(made.on, made.region, k_whole);
        expect_peers_seen(made.on, made.region, window, 1);
      },
      std::chrono::milliseconds(1500));
}

TEST(nccl_window, a_heap_that_grows_waits_for_who_uses_its_windows) {
  const nccl_fixture fake({.version = 23007});
  run_nccl_ranks(2, [](const rank_context& at) {
    nccl_communicator on(at.ranks, at.on);
    {
      symmetric_heap heap(at.make(), {.growth_step = 2_MiB});
      const native_stream stream = at.on->create_stream({0});
      const std::size_t used = heap.allocate(4096, stream);
      const nccl_window window(on, heap.region(), k_whole);
      const int before = fake_nccl_count().registrations;
      // Work of the stream goes on while the growth is under way, as long as it takes.
      std::atomic<bool> asked = false;
      std::atomic<bool> replaced = false;
      const auto watching =
          heap.region().observe({.before_change = [&](const region_change&) { asked = true; }});
      at.on->launch(stream, [&] {
        while (!asked) std::this_thread::yield();
        const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(200);
        while (!replaced && std::chrono::steady_clock::now() < until) {
          replaced = fake_nccl_count().registrations > before;
          std::this_thread::yield();
        }
      });
      const std::size_t large = heap.allocate(3_MiB);
      at.on->synchronize(stream);
      EXPECT_FALSE(replaced) << "the window went while a stream could use it";
      EXPECT_NE(window.at(large).window, nullptr);
      heap.free(used);
      heap.close();
      at.on->destroy_stream(stream);
    }
    on.close();
  });
}

TEST(nccl_window, goes_with_its_region) {
  const nccl_fixture fake({.version = 23007});
  run_nccl_ranks(2, [](const rank_context& at) {
    nccl_communicator on(at.ranks, at.on);
    std::optional<symmetric_region> region(at.make());
    region->grow(tier::device, 2_MiB);
    const nccl_window closed(on, *region);
    region->close();
    EXPECT_THAT(thrown_by([&] { (void)closed.at(0); }), HasSubstr("region was closed"));
    region.emplace(at.make());
    region->grow(tier::device, 2_MiB);
    const nccl_window destroyed(on, *region, k_whole);
    symmetric_region moved(std::move(*region));
    region.reset();
    moved.grow(tier::device, 2_MiB);
    EXPECT_EQ(text_of(destroyed.pieces()), "0+4") << "a region may move";
    at.ranks->barrier();
    { const symmetric_region gone(std::move(moved)); }
    EXPECT_EQ(destroyed.pieces().size(), 0u);
  });
}

TEST(nccl_window, needs_an_nccl_that_has_windows) {
  const nccl_fixture fake({.version = 22605});
  run_nccl_ranks(2, [](const rank_context& at) {
    two_device_segments made(at);
    EXPECT_THAT(thrown_by_all(*at.ranks, [&] { nccl_window(made.on, made.region); }),
                AllOf(StartsWith("unsupported"), HasSubstr("NCCL 2.26.5"), HasSubstr("2.27.0")));
  });
}

}  // namespace
}  // namespace evmm::test
