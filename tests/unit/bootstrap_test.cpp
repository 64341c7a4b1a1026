// SPDX-License-Identifier: Apache-2.0
#include "tests/support/bootstrap_contract.hpp"
#include "tests/support/memory_store.hpp"
#include "tests/support/scoped_variable.hpp"
#include "tests/support/thread_ranks.hpp"

#include <evmm/comm/bootstrap.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace evmm::test {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

/// How the ranks of a test find each other; made once, then asked by each rank's thread.
using maker = std::function<std::shared_ptr<bootstrap>(int rank)>;

maker over_threads(int size) {
  return [made = make_thread_bootstraps(size)](int rank) {
    return made[static_cast<std::size_t>(rank)];
  };
}

maker over_store(int size) {
  return [store = std::make_shared<memory_store>(), size](int rank) {
    return make_store_bootstrap(rank_id{rank}, size, store->face());
  };
}

/// What a user's own collective would be: here another bootstrap plays it.
maker over_callback(int size) {
  return [under = over_threads(size), size](int rank) {
    return make_callback_bootstrap(
        rank_id{rank}, size,
        [ranks = under(rank)](std::span<const std::byte> mine) { return ranks->all_gather(mine); });
  };
}

struct way {
  const char* name;
  maker (*make)(int size);
};

class bootstrap_contract : public testing::TestWithParam<std::tuple<way, int>> {
 protected:
  int size() const { return std::get<1>(GetParam()); }
  void on_each_rank(const std::function<void(bootstrap&)>& body) {
    const auto make = std::get<0>(GetParam()).make(size());
    for (const auto& thrown : run_ranks(size(), [&](int rank) { body(*make(rank)); })) {
      EXPECT_EQ(what(thrown), "");
    }
  }
};

TEST_P(bootstrap_contract, gathers_bytes_of_any_length) {
  on_each_rank(check_gathers);
}

TEST_P(bootstrap_contract, broadcasts_from_any_root) {
  on_each_rank(check_broadcasts);
}

TEST_P(bootstrap_contract, agrees_on_one_error) {
  on_each_rank(check_agreement);
}

TEST_P(bootstrap_contract, tells_ranks_that_diverge_apart) {
  if (size() == 1) return;
  on_each_rank(check_divergence);
}

TEST_P(bootstrap_contract, finds_one_node) {
  on_each_rank([this](bootstrap& ranks) {
    EXPECT_EQ(ranks.node_count(), 1);
    EXPECT_EQ(ranks.node(), 0);
    EXPECT_EQ(ranks.node_rank(), ranks.rank().value);
    EXPECT_EQ(ranks.node_ranks().size(), static_cast<std::size_t>(size()));
  });
}

TEST_P(bootstrap_contract, checks_its_timeout) {
  on_each_rank([](bootstrap& ranks) {
    EXPECT_THROW(ranks.set_timeout(std::chrono::milliseconds(0)), invalid_argument);
    EXPECT_EQ(ranks.timeout(), std::chrono::seconds(30));
    ranks.set_timeout(std::chrono::milliseconds(1234));
    EXPECT_EQ(ranks.timeout(), std::chrono::milliseconds(1234));
  });
}

INSTANTIATE_TEST_SUITE_P(each, bootstrap_contract,
                         testing::Combine(testing::Values(way{"threads", over_threads},
                                                          way{"store", over_store},
                                                          way{"callback", over_callback}),
                                          testing::Values(1, 2, 4)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param).name) + "_" +
                                  std::to_string(std::get<1>(info.param));
                         });

void expect_absence_named(const maker& lost, int size) {
  const auto world = over_threads(size);
  for (const auto& thrown :
       run_ranks(size, [&](int rank) { check_absence(*lost(rank), *world(rank)); })) {
    EXPECT_EQ(what(thrown), "");
  }
}

TEST(thread_bootstrap, names_ranks_that_do_not_arrive) {
  for (const int size : {2, 4}) expect_absence_named(over_threads(size), size);
}

TEST(store_bootstrap, names_ranks_that_do_not_arrive) {
  for (const int size : {2, 4}) expect_absence_named(over_store(size), size);
}

TEST(store_bootstrap, leaves_few_keys) {
  memory_store store;
  run_ranks(3, [&](int rank) {
    const auto ranks = make_store_bootstrap(rank_id{rank}, 3, store.face(), "job");
    for (int i = 0; i < 20; ++i) ranks->barrier();
  });
  EXPECT_EQ(store.size(), 6u);  // the last two steps of each rank
  EXPECT_TRUE(store.get("evmm/job/20/2", {}));
}

TEST(store_bootstrap, keeps_jobs_apart) {
  memory_store store;
  for (const char* job : {"a", "b"}) {
    run_ranks(2, [&](int rank) {
      const auto ranks = make_store_bootstrap(rank_id{rank}, 2, store.face(), job);
      check_gathers(*ranks);
    });
  }
}

TEST(store_bootstrap, names_all_who_are_missing) {
  memory_store store;
  ASSERT_EQ(setenv("EVMM_TIMEOUT_MS", "200", 1), 0);
  const auto text = thrown_by([&] { make_store_bootstrap(rank_id{1}, 4, store.face()); });
  unsetenv("EVMM_TIMEOUT_MS");
  EXPECT_THAT(text, StartsWith("timed_out: ranks 0, 2 and 3 did not arrive in all_gather "
                               "'find_nodes' within 0.2 s"));
}

TEST(store_bootstrap, reports_what_the_store_throws) {
  const key_value_store broken{
      .set = [](const std::string&,
                std::span<const std::byte>) { throw std::runtime_error("connection reset"); },
      .get = [](const std::string&, std::chrono::milliseconds) { return std::nullopt; }};
  EXPECT_THAT(thrown_by([&] { make_store_bootstrap(rank_id{0}, 1, broken); }),
              StartsWith("peer_error: all_gather 'find_nodes' failed on rank 0: connection reset"));
  EXPECT_THROW(make_store_bootstrap(rank_id{0}, 1, {}), invalid_argument);
}

TEST(store_bootstrap, whatever_a_store_throws_on_one_rank_fails_the_step_for_all) {
  const std::vector<std::function<void()>> ways = {
      [] { throw std::runtime_error("connection reset"); },
      [] { throw driver_error("connection reset", "try again", 104); },
      [] { throw timed_out("no answer"); },
      [] { throw 7; },
  };
  std::vector<std::string> said;
  for (const auto& fail : ways) {
    memory_store store;
    const auto since = std::chrono::steady_clock::now();
    const auto thrown = run_ranks(3, [&](int rank) {
      bool fails = false;
      auto face = store.face();
      if (rank == 1) {
        face.get = [&, get = face.get](const std::string& key, std::chrono::milliseconds wait) {
          if (std::exchange(fails, false)) fail();
          return get(key, wait);
        };
      }
      const auto ranks = make_store_bootstrap(rank_id{rank}, 3, face);
      fails = rank == 1;
      ranks->barrier("tea");
      ranks->barrier("more tea");
    });
    for (const auto& failure : thrown) {
      EXPECT_THAT(what(failure), HasSubstr("barrier 'tea' failed on rank 1: "));
      EXPECT_EQ(what(failure), what(thrown[1]));
    }
    said.push_back(what(thrown[1]));
    EXPECT_LT(std::chrono::steady_clock::now() - since, std::chrono::seconds(10));
  }
  EXPECT_EQ(said[0], "peer_error: barrier 'tea' failed on rank 1: connection reset");
}

TEST(store_bootstrap, a_timeout_that_one_rank_cannot_read_fails_all_and_soon) {
  memory_store store;
  std::string said;
  {
    const scoped_variable bad("EVMM_TIMEOUT_MS", "soon");
    std::jthread first(
        [&] { said = thrown_by([&] { make_store_bootstrap(rank_id{0}, 2, store.face()); }); });
    EXPECT_TRUE(store.get("evmm/evmm/0/0", std::chrono::seconds(5))) << "it takes part";
    unsetenv("EVMM_TIMEOUT_MS");
    EXPECT_THAT(thrown_by([&] { make_store_bootstrap(rank_id{1}, 2, store.face()); }),
                StartsWith("invalid_argument: rank 0: EVMM_TIMEOUT_MS is 'soon'"));
  }
  EXPECT_THAT(said, StartsWith("invalid_argument: rank 0: EVMM_TIMEOUT_MS is 'soon'"));
}

TEST(callback_bootstrap, checks_what_the_callback_returns) {
  using messages = std::vector<std::vector<std::byte>>;
  const auto made_over = [](messages result) {
    return thrown_by([&] {
      make_callback_bootstrap(rank_id{0}, 2, [&](std::span<const std::byte>) { return result; });
    });
  };
  EXPECT_THAT(made_over({}), HasSubstr("gave 0 messages for 2 ranks"));
  EXPECT_THAT(made_over({{}, {}}), HasSubstr("rank 0 sent a message that is 4 bytes short"));
  EXPECT_THAT(made_over({std::vector<std::byte>(64), {}}), HasSubstr("is not a message of this"));
  EXPECT_THROW(make_callback_bootstrap(rank_id{0}, 1, {}), invalid_argument);
}

TEST(thread_bootstrap, tells_hosts_apart) {
  const auto made = make_thread_bootstraps(5, {"b", "a", "b", "c", "a"});
  EXPECT_EQ(made[0]->nodes(), (std::vector<int>{0, 1, 0, 2, 1}));
  EXPECT_EQ(made[0]->node_count(), 3);
  EXPECT_EQ(made[4]->node(), 1);
  EXPECT_EQ(made[4]->node_rank(), 1);
  EXPECT_EQ(made[4]->node_ranks(), (std::vector<rank_id>{{1}, {4}}));
  EXPECT_THROW(make_thread_bootstraps(2, {"a"}), invalid_argument);
  EXPECT_THROW(make_thread_bootstraps(0), invalid_argument);
}

TEST(thread_bootstrap, does_not_wait_for_a_rank_that_left) {
  auto made = make_thread_bootstraps(3);
  made[1].reset();
  const auto thrown = run_ranks(3, [&](int rank) {
    if (rank != 1) made[static_cast<std::size_t>(rank)]->barrier();
  });
  for (const std::size_t rank : {0u, 2u}) {
    EXPECT_THAT(what(thrown[rank]), HasSubstr(" left before barrier"));
  }
}

TEST(host_identity, is_the_same_for_all_and_split_on_request) {
  const auto here = bootstrap::host_identity();
  EXPECT_EQ(here, bootstrap::host_identity());
  ASSERT_EQ(setenv("EVMM_HOST_ID", "second", 1), 0);
  EXPECT_NE(here, bootstrap::host_identity());
  unsetenv("EVMM_HOST_ID");
}

TEST(bootstrap, checks_its_rank_and_its_environment) {
  memory_store store;
  EXPECT_THROW(make_store_bootstrap(rank_id{2}, 2, store.face()), invalid_argument);
  EXPECT_THROW(make_store_bootstrap(rank_id{-1}, 2, store.face()), invalid_argument);
  EXPECT_THROW(make_store_bootstrap(rank_id{0}, 0, store.face()), invalid_argument);
  ASSERT_EQ(setenv("EVMM_TIMEOUT_MS", "soon", 1), 0);
  EXPECT_THAT(thrown_by([&] { make_store_bootstrap(rank_id{0}, 1, store.face()); }),
              HasSubstr("EVMM_TIMEOUT_MS is 'soon'"));
  EXPECT_THAT(thrown_by([] { make_thread_bootstraps(1); }), HasSubstr("EVMM_TIMEOUT_MS is 'soon'"));
  unsetenv("EVMM_TIMEOUT_MS");
}

}  // namespace
}  // namespace evmm::test
