// SPDX-License-Identifier: Apache-2.0
#include "tests/support/ep_cases.hpp"
#include "tests/support/fault_driver.hpp"
#include "tests/support/forwarding_driver.hpp"
#include "tests/support/scoped_capture.hpp"
#include "tests/support/thread_ranks.hpp"

#include <evmm/comm/symmetric_buffer.hpp>
#include <evmm/comm/symmetric_channel.hpp>
#include <evmm/ep/exchange.hpp>
#include <evmm/ep/low_latency.hpp>
#include <evmm/ep/table.hpp>
#include <evmm/host_driver.hpp>
#include <evmm/units.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace evmm::test {
namespace {

using namespace evmm::units;

struct threads_case {
  std::string hosts;  ///< of each rank: "aabb" for two of two ranks each
  symmetric_case tried;
  friend void PrintTo(const threads_case& run, std::ostream* out) {
    *out << run.tried.name << " on " << run.hosts;
  }
};
class ep_threads : public ::testing::TestWithParam<threads_case> {};

TEST_P(ep_threads, holds) {
  const auto size = static_cast<int>(GetParam().hosts.size());
  std::vector<std::string> hosts;
  for (const char host : GetParam().hosts) hosts.emplace_back(1, host);
  const auto bootstraps = make_thread_bootstraps(size, hosts);
  const auto thrown = run_ranks(size, [&](int rank) {
    GetParam().tried.run({.ranks = bootstraps[static_cast<std::size_t>(rank)],
                          .on = host_driver::make({.device_bytes = 4_GiB, .host_bytes = 4_GiB})});
  });
  for (const auto& failure : thrown) EXPECT_EQ(what(failure), "");
}

TEST(ep_nodes, have_as_many_ranks_each) {
  const auto bootstraps = make_thread_bootstraps(3, {"a", "a", "b"});
  run_ranks(3, [&](int rank) {
    const rank_context at{.ranks = bootstraps[static_cast<std::size_t>(rank)],
                          .on = host_driver::make({})};
    symmetric_heap heap(at.make());
    symmetric_channel across(heap.region());
    EXPECT_THAT(
        thrown_by([&] { ep::exchange(heap, across, {.experts = 3, .top_k = 1, .hidden = 128}); }),
        ::testing::HasSubstr("the node of rank 0 has 2 ranks, that of rank 2 has 1"));
    across.close();
  });
}

TEST(ep_footprint, refuses_what_cannot_be) {
  const ep::exchange_options good{.experts = 128, .top_k = 8, .hidden = 7168};
  EXPECT_GT(ep::footprint(good, {.ranks = 64, .nodes = 8}).device_bytes, 0u);
  const auto refused = [](const ep::exchange_options& options, const ep::job_shape& job,
                          const char* why) {
    EXPECT_THAT(thrown_by([&] { ep::footprint(options, job); }), ::testing::HasSubstr(why));
    EXPECT_THAT(thrown_by([&] { ep::plan_footprint(options, job); }), ::testing::HasSubstr(why));
  };
  refused(good, {.ranks = 3, .nodes = 2}, "a job of 3 ranks on 2 nodes");
  refused(good, {.ranks = 0, .nodes = 1}, "a job of 0 ranks");
  refused(good, {.ranks = 128, .nodes = 1}, "128 ranks on a node");
  refused(good, {.ranks = 128, .nodes = 128}, "128 nodes");
  refused(good, {.ranks = 3, .nodes = 1}, "experts is 128, with 3 ranks");
  auto large = good;
  large.max_tokens = std::size_t{1} << 20;
  large.top_k = 32;
  refused(large, {.ranks = 64, .nodes = 1}, "up to 2147483648 choices come to a rank");
  EXPECT_THAT(thrown_by([] {
                ep::footprint(ep::low_latency_options{.experts = 2, .hidden = 100}, {.ranks = 2});
              }),
              ::testing::HasSubstr("hidden is 100"));
}

TEST(ep_nodes, a_rank_that_did_not_come_is_named_as_the_job_does) {
  const auto bootstraps = make_thread_bootstraps(4, {"a", "a", "b", "b"});
  const auto thrown = run_ranks(4, [&](int rank) {
    const rank_context at{.ranks = bootstraps[static_cast<std::size_t>(rank)],
                          .on = host_driver::make({})};
    symmetric_heap heap(at.make());
    symmetric_channel across(heap.region());
    ep::exchange exchange(heap, across,
                          {.experts = 4,
                           .top_k = 1,
                           .hidden = 128,
                           .max_tokens = 4,
                           .sms = 1,
                           .timeout = std::chrono::milliseconds(200)});
    ep::plan plan = exchange.make_plan();
    if (rank % 2 == 0) {
      exchange.dispatch({}, plan, nullptr);
      at.on->synchronize(native_stream{nullptr});
      EXPECT_THAT(thrown_by([&] { exchange.check(); }),
                  ::testing::HasSubstr("ranks " + std::to_string(rank + 1) + " did not come"));
    }
    at.ranks->barrier("all have seen it");
    across.close();
  });
  for (const auto& failure : thrown) EXPECT_EQ(what(failure), "");
}

TEST(ep_nodes, a_rank_of_another_node_that_did_not_come_is_told) {
  const auto bootstraps = make_thread_bootstraps(2, {"a", "b"});
  const auto thrown = run_ranks(2, [&](int rank) {
    const auto on = fault_driver::make(host_driver::make({}));
    const rank_context at{.ranks = bootstraps[static_cast<std::size_t>(rank)], .on = on};
    symmetric_heap heap(at.make());
    symmetric_channel across(heap.region());
    ep::exchange exchange(heap, across,
                          {.experts = 2, .top_k = 2, .hidden = 128, .max_tokens = 1, .sms = 1});
    ep::plan plan = exchange.make_plan();
    const symmetric_buffer<std::uint16_t> x(heap, 128);
    const symmetric_buffer<std::int64_t> ids(heap, 2);
    on->synchronize(native_stream{});
    ids.elements()[0] = 0;
    ids.elements()[1] = 1;
    exchange.dispatch({.x = x.local(), .topk_ids = ids.local(), .count = 1}, plan, nullptr);
    across.synchronize(nullptr);
    exchange.check();
    at.ranks->barrier("one rank leaves");
    const auto usual = at.ranks->timeout();
    at.ranks->set_timeout(std::chrono::milliseconds(200));
    if (rank == 0) {
      exchange.combine(plan, x.local(), nullptr, nullptr);
      on->synchronize(native_stream{});
      EXPECT_THAT(thrown_by([&] { exchange.check(); }), ::testing::HasSubstr("rank 1"));
      // What cannot be done is not begun.
      on->clear_record();
      EXPECT_THAT(thrown_by([&] { exchange.combine(plan, x.local(), nullptr, nullptr); }),
                  ::testing::HasSubstr("rank 1"));
      EXPECT_THAT(on->record_of_calls(), ::testing::Not(::testing::Contains(driver_call::launch)));
    }
    at.ranks->set_timeout(usual);
    at.ranks->barrier("it was seen");
    at.ranks->set_timeout(std::chrono::milliseconds(200));
    EXPECT_NE(thrown_by([&] { across.close(); }), "");
  });
  for (const auto& failure : thrown) EXPECT_EQ(what(failure), "");
}

TEST(ep_nodes, a_capture_is_refused_before_anything_is_enqueued) {
  const auto bootstraps = make_thread_bootstraps(2, {"a", "b"});
  const auto thrown = run_ranks(2, [&](int rank) {
    const auto on = fault_driver::make(host_driver::make({}));
    const rank_context at{.ranks = bootstraps[static_cast<std::size_t>(rank)], .on = on};
    symmetric_heap heap(at.make());
    symmetric_channel across(heap.region());
    ep::exchange exchange(heap, across,
                          {.experts = 2, .top_k = 1, .hidden = 128, .max_tokens = 1, .sms = 1});
    ep::plan plan = exchange.make_plan();
    const native_stream stream = on->create_stream(at.device);
    exchange.dispatch({}, plan, stream);
    across.synchronize(stream);
    on->clear_record();
    {
      scoped_capture graph(*on, stream);
      const std::string why = "what crosses nodes cannot be captured";
      EXPECT_THAT(thrown_by([&] { exchange.combine(plan, nullptr, nullptr, stream); }),
                  ::testing::HasSubstr(why));
      EXPECT_THAT(thrown_by([&] { exchange.dispatch_again({}, plan, stream); }),
                  ::testing::HasSubstr(why));
      EXPECT_THAT(thrown_by([&] { exchange.dispatch({}, plan, stream); }),
                  ::testing::HasSubstr(why));
      EXPECT_THAT(on->record_of_calls(), ::testing::Not(::testing::Contains(driver_call::launch)));
      graph.end();
    }
    // The plan is what it was.
    exchange.combine(plan, nullptr, nullptr, stream);
    across.synchronize(stream);
    exchange.check();
    across.close();
    on->destroy_stream(stream);
  });
  for (const auto& failure : thrown) EXPECT_EQ(what(failure), "");
}

/// A rank without tokens has no weights to give, and need not know who has.
TEST(ep_nodes, gradients_of_weights_come_to_those_that_want_them) {
  const auto bootstraps = make_thread_bootstraps(2, {"a", "b"});
  const auto thrown = run_ranks(2, [&](int rank) {
    const auto on = host_driver::make({});
    const rank_context at{.ranks = bootstraps[static_cast<std::size_t>(rank)], .on = on};
    symmetric_heap heap(at.make());
    symmetric_channel across(heap.region());
    ep::exchange exchange(heap, across,
                          {.experts = 2, .top_k = 2, .hidden = 128, .max_tokens = 1, .sms = 1});
    ep::plan plan = exchange.make_plan();
    const symmetric_buffer<std::uint16_t> x(heap, 128);
    const symmetric_buffer<std::int64_t> ids(heap, 2);
    const symmetric_buffer<float> gradients(heap, 2);
    on->synchronize(native_stream{});
    ids.elements()[0] = 1;
    ids.elements()[1] = 0;
    ep::tokens mine{.x = x.local(), .topk_ids = ids.local(), .count = 1};
    if (rank == 1) mine = {};
    exchange.dispatch(mine, plan, nullptr);
    exchange.combine(plan, x.local(), nullptr, nullptr);
    exchange.combine_backward(mine, plan, nullptr, nullptr);
    across.synchronize(nullptr);
    // Rank 0 has one row, and so has rank 1.
    exchange.weight_gradients()[0] = static_cast<float>(10 + rank);
    exchange.weight_gradients()[1] = static_cast<float>(20 + rank);
    at.ranks->barrier("gradients are there");
    if (rank == 0) {
      exchange.dispatch_backward(plan, x.local(), ids.local(), gradients.local(), nullptr);
    } else {
      exchange.dispatch_backward(plan, nullptr, nullptr, nullptr, nullptr);
    }
    across.synchronize(nullptr);
    exchange.check();
    if (rank == 0) {
      EXPECT_EQ(gradients.elements()[0], 11);
      EXPECT_EQ(gradients.elements()[1], 20);
    }
    across.close();
  });
  for (const auto& failure : thrown) EXPECT_EQ(what(failure), "");
}

TEST(ep_heap, what_is_made_again_and_again_takes_no_more) {
  const rank_context at{.ranks = make_thread_bootstraps(1)[0], .on = host_driver::make({})};
  const std::function<void(symmetric_heap&)> exchange = [](symmetric_heap& heap) {
    ep::exchange(heap, {.experts = 1, .top_k = 2, .hidden = 4096, .device_rows = 512, .sms = 1});
  };
  const std::function<void(symmetric_heap&)> table = [](symmetric_heap& heap) {
    ep::table(heap, {.rows = 40'000,
                     .row_bytes = 128,
                     .tiers = tier_policy::device_first,
                     .device_rows = 10'000,
                     .max_batch = 1});
  };
  for (const auto& make : {exchange, table}) {
    // Segments run short first, then memory.
    for (const std::size_t device_limit : {512_MiB, 24_MiB}) {
      symmetric_heap heap(at.make({.reserve = 4_GiB, .max_segments = 64}),
                          {.growth_step = 2_MiB, .device_limit = device_limit});
      std::size_t most = 0;
      for (int round = 0; round < 40; ++round) {
        make(heap);
        most = std::max(most, heap.region().size());
      }
      EXPECT_LT(most, 512_MiB);
    }
  }
}

TEST(ep_heap, what_needs_less_of_the_device_makes_room_for_what_needs_more) {
  const rank_context at{.ranks = make_thread_bootstraps(1)[0], .on = host_driver::make({})};
  symmetric_heap heap(at.make({.reserve = 1_GiB, .max_segments = 64}),
                      {.growth_step = 2_MiB, .device_limit = 44_MiB});
  // 256 rows lie in 2 MiB. By source there are few on the device at first, by expert many.
  ep::exchange exchange(heap, {.experts = 4,
                               .top_k = 4,
                               .hidden = 4096,
                               .arranged = ep::layout::by_expert,
                               .max_tokens = 1024,
                               .device_rows = 256,
                               .device_expert_rows = 2048,
                               .adapt_steps = 4,
                               .sms = 1});
  ep::plan plan = exchange.make_plan();
  constexpr std::size_t count = 900;
  const symmetric_buffer<std::uint16_t> x(heap, count * 4096, nullptr,
                                          {.tiers = tier_policy::host_only});
  const symmetric_buffer<std::int64_t> ids(heap, count * 4, nullptr,
                                           {.tiers = tier_policy::host_only});
  at.on->synchronize(native_stream{});
  // Then many tokens come, with one choice each.
  for (std::size_t i = 0; i < ids.size(); ++i) ids.elements()[i] = i % 4 == 0 ? 0 : -1;
  exchange.dispatch({.x = x.local(), .topk_ids = ids.local(), .count = count}, plan, nullptr);
  EXPECT_EQ(exchange.adapt(1), 1024u);
  EXPECT_EQ(exchange.options().device_expert_rows, 1024u);
}

/// Tells who waits for the default stream.
class default_stream_driver final : public forwarding_driver {
 public:
  using forwarding_driver::forwarding_driver;
  void synchronize(native_stream stream) override {
    if (stream == native_stream{} && on_wait) on_wait();
    forwarding_driver::synchronize(stream);
  }
  void synchronize(native_event event) override { forwarding_driver::synchronize(event); }
  std::function<void()> on_wait;
};

TEST(ep_heap, what_other_streams_do_with_freed_blocks_is_over_before_they_are_used) {
  for (const std::vector<std::string>& hosts : {std::vector<std::string>{"a", "a"}, {"a", "b"}}) {
    const auto bootstraps = make_thread_bootstraps(2, hosts);
    const auto thrown = run_ranks(2, [&](int rank) {
      const auto on = std::make_shared<default_stream_driver>(host_driver::make({}));
      const rank_context at{.ranks = bootstraps[static_cast<std::size_t>(rank)], .on = on};
      symmetric_heap heap(at.make({.reserve = 1_GiB, .max_segments = 64}), {.growth_step = 2_MiB});
      std::optional<symmetric_channel> across;
      if (at.ranks->node_count() > 1) across.emplace(heap.region());
      const native_stream before = on->create_stream({0});
      // Blocks are freed while `before` is held in the middle of its work on them.
      const auto expect_waited = [&](const char* what, const std::function<void()>& make) {
        symmetric_buffer<std::byte> held(heap, 1_MiB, before);
        stream_gate gate(*on, before);
        on->fill(reinterpret_cast<address>(held.local()), std::byte{0x7f}, held.bytes(), before);
        held.reset();
        bool waited = false;
        on->on_wait = [&] {
          waited = true;
          gate.open();
        };
        make();
        on->on_wait = {};
        EXPECT_TRUE(waited) << what;
      };
      const ep::exchange_options options{.experts = 2, .top_k = 1, .hidden = 128, .max_tokens = 4};
      const ep::low_latency_options few{.experts = 2, .top_k = 1, .hidden = 128, .max_tokens = 4};
      std::optional<ep::exchange> exchange;
      std::optional<ep::plan> plan;
      std::optional<ep::low_latency_exchange> low_latency;
      expect_waited("exchange", [&] {
        across ? exchange.emplace(heap, *across, options) : exchange.emplace(heap, options);
      });
      expect_waited("plan", [&] { plan.emplace(exchange->make_plan()); });
      expect_waited("low latency", [&] {
        across ? low_latency.emplace(heap, *across, few) : low_latency.emplace(heap, few);
      });
      exchange->dispatch({}, *plan, before);
      ep::low_latency_exchange::round round;
      low_latency->dispatch({}, round, before);
      if (across) across->synchronize(before);
      on->synchronize(before);
      exchange->check();
      EXPECT_EQ(exchange->counts().rows, 0u);
      EXPECT_EQ(low_latency->dead_ranks(), 0u);
      if (across) across->close();
    });
    for (const auto& failure : thrown) EXPECT_EQ(what(failure), "");
  }
}

TEST(ep_heap, a_rank_that_has_not_come_yet_sent_nothing) {
  for (const auto arranged : {ep::layout::by_source, ep::layout::by_expert}) {
    const auto bootstraps = make_thread_bootstraps(2);
    const auto thrown = run_ranks(2, [&](int rank) {
      const rank_context at{.ranks = bootstraps[static_cast<std::size_t>(rank)],
                            .on = host_driver::make({})};
      symmetric_heap heap(at.make({.reserve = 1_GiB}), {.growth_step = 2_MiB});
      {  // What others leave behind are no counts.
        const symmetric_buffer<std::byte> before(heap, 1_MiB);
        at.on->fill(reinterpret_cast<address>(before.local()), std::byte{0x11}, before.bytes(),
                    nullptr);
      }
      ep::exchange exchange(heap, {.experts = 2,
                                   .top_k = 1,
                                   .hidden = 128,
                                   .arranged = arranged,
                                   .max_tokens = 4,
                                   .sms = 1,
                                   .timeout = std::chrono::milliseconds(100)});
      ep::plan plan = exchange.make_plan();
      if (rank == 0) {
        const symmetric_buffer<std::uint16_t> x(heap, 4 * 128);
        const symmetric_buffer<std::int64_t> ids(heap, 4);
        for (std::int64_t& id : ids.elements()) id = 0;
        exchange.dispatch({.x = x.local(), .topk_ids = ids.local(), .count = 4}, plan, nullptr);
        at.on->synchronize(native_stream{});
        EXPECT_EQ(exchange.counts().rows, 4u);
        EXPECT_THAT(thrown_by([&] { exchange.check(); }), ::testing::HasSubstr("ranks 1 did not"));
      }
      at.ranks->barrier("the other one does not come");
    });
    for (const auto& failure : thrown) EXPECT_EQ(what(failure), "");
  }
}

std::vector<threads_case> all_cases() {
  std::vector<threads_case> all;
  for (const char* hosts : {"a", "aa", "aaaa", "ab", "abab", "abc"}) {
    for (const auto* cases :
         {&ep_cases(), &ep_call_cases(), &low_latency_cases(), &lost_rank_cases()}) {
      for (const symmetric_case& tried : *cases) all.push_back({hosts, tried});
    }
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(ranks, ep_threads, ::testing::ValuesIn(all_cases()), [](const auto& info) {
  return info.param.tried.name + "_" + info.param.hosts;
});

}  // namespace
}  // namespace evmm::test
