// SPDX-License-Identifier: Apache-2.0
#include "tests/support/nccl_ranks.hpp"

#include <evmm/error.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <optional>
#include <string>
#include <utility>

namespace evmm::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

TEST(nccl_communicator, tells_what_was_found_and_what_it_can) {
  const nccl_fixture fake({.version = 22809});
  run_nccl_ranks(2, [](const rank_context& at) {
    nccl_communicator on(at.ranks, at.on);
    EXPECT_EQ(on.version(), 22809);
    EXPECT_THAT(on.library(), HasSubstr("libnccl.so.2"));
    EXPECT_EQ(on.why_not(nccl_ability::windows), "");
    EXPECT_THAT(on.why_not(nccl_ability::several_segments),
                AllOf(HasSubstr("NCCL 2.28.9"), HasSubstr("2.30.3")));
    EXPECT_NE(on.get(), nullptr);
    on.close();
    EXPECT_THAT(thrown_by([&] { (void)on.get(); }), HasSubstr("closed"));
    on.close();
  });
}

TEST(nccl_communicator, without_a_bootstrap_or_a_driver_is_refused) {
  const nccl_fixture fake({.version = 23007});
  run_nccl_ranks(2, [](const rank_context& at) {
    EXPECT_THAT(thrown_by([&] { nccl_communicator(nullptr, at.on); }),
                HasSubstr("without a bootstrap"));
    EXPECT_THAT(thrown_by_all(*at.ranks,
                              [&] {
                                const bool has_one = at.ranks->rank() == rank_id{0};
                                nccl_communicator(at.ranks, has_one ? at.on : nullptr);
                              }),
                StartsWith("invalid_argument: rank 1: an NCCL communicator without a driver"));
  });
}

TEST(nccl_communicator, every_ability_has_a_name_and_a_version) {
  for (const auto ability :
       {nccl_ability::user_buffers, nccl_ability::windows, nccl_ability::several_segments,
        nccl_ability::host_segments, nccl_ability::host_segments_over_network,
        nccl_ability::peer_pointers, nccl_ability::gin}) {
    EXPECT_STRNE(to_string(ability), "ability");
    EXPECT_GT(nccl_version_with(ability), 20000);
  }
}

TEST(nccl_communicator, blocks_when_asked_to) {
  const nccl_fixture fake({.version = 23007});
  run_nccl_ranks(2, [](const rank_context& at) {
    nccl_communicator on(at.ranks, at.on, {.blocking = true});
    auto region = at.make();
    region.grow(tier::device, 2_MiB);
    {
      const nccl_window window(on, region);
      EXPECT_EQ(window.pieces().size(), 1u);
    }
    on.close();
  });
}

TEST(nccl_communicator, adopts_one_and_leaves_it_to_its_owner) {
  const nccl_fixture fake({.version = 23007});
  run_nccl_ranks(2, [](const rank_context& at) {
    nccl_communicator owner(at.ranks, at.on);
    {
      nccl_communicator adopted(owner.get(), at.ranks, at.on);
      EXPECT_EQ(adopted.get(), owner.get());
      EXPECT_EQ(adopted.device(), device_id{0});
      adopted.close();
    }
    owner.settle("nothing");
    owner.close();
  });
}

TEST(nccl_communicator, refuses_to_adopt_what_is_not_of_these_ranks) {
  const nccl_fixture fake({.version = 23007});
  run_nccl_ranks(2, [](const rank_context& at) {
    const auto alone = make_thread_bootstraps(1)[0];
    const nccl_communicator other(alone, at.on);
    EXPECT_THAT(thrown_by_all(*at.ranks, [&] { nccl_communicator(other.get(), at.ranks, at.on); }),
                AllOf(StartsWith("invalid_argument: rank 0"), HasSubstr("rank 0 of 1"),
                      HasSubstr("rank 0 of 2")));
    EXPECT_THAT(thrown_by_all(*at.ranks, [&] { nccl_communicator(nullptr, at.ranks, at.on); }),
                HasSubstr("is null"));
  });
}

TEST(nccl_communicator, one_ranks_failure_is_everybodys) {
  const nccl_fixture fake({.version = 22809, .fail_rank = 1, .fail_init = 1});
  run_nccl_ranks(
      3,
      [](const rank_context& at) {
        EXPECT_THAT(thrown_by_all(*at.ranks, [&] { nccl_communicator(at.ranks, at.on); }),
                    AllOf(HasSubstr("ncclCommInitRankConfig"), HasSubstr("2 more ranks failed")));
        nccl_communicator(at.ranks, at.on).close();
      },
      std::chrono::milliseconds(1500));
}

TEST(nccl_communicator, addresses_for_windows_are_told_to_nccl_in_time) {
  const nccl_fixture fake({.version = 23007});
  run_nccl_ranks(2, [](const rank_context& at) {
    nccl_communicator first(at.ranks, at.on);
    EXPECT_EQ(first.window_bytes(), 4_GiB) << "the device's 1 GiB in NCCL's unit";
    EXPECT_THAT(thrown_by_all(*at.ranks,
                              [&] { nccl_communicator(at.ranks, at.on, {.window_bytes = 1_TiB}); }),
                AllOf(StartsWith("invalid_argument"), HasSubstr("1.0 TiB"),
                      HasSubstr("NCCL_WIN_STRIDE"), HasSubstr("first communicator")));
    first.close();
  });
  const scoped_variable stride("NCCL_WIN_STRIDE", "0x400000000");
  run_nccl_ranks(2, [](const rank_context& at) {
    EXPECT_THAT(thrown_by_all(*at.ranks,
                              [&] { nccl_communicator(at.ranks, at.on, {.window_bytes = 1_TiB}); }),
                HasSubstr("NCCL_WIN_STRIDE=17179869184"));
    nccl_communicator fits(at.ranks, at.on, {.window_bytes = 8_GiB});
    EXPECT_EQ(fits.window_bytes(), 16_GiB);
    fits.close();
  });
}

TEST(nccl_communicator, a_window_larger_than_what_nccl_keeps_is_refused_before_it_breaks_anything) {
  const nccl_fixture fake({.version = 23007});
  const scoped_variable stride("NCCL_WIN_STRIDE", "1");  // one unit
  run_nccl_ranks(2, [](const rank_context& at) {
    nccl_communicator on(at.ranks, at.on);
    EXPECT_EQ(on.window_bytes(), 4_GiB);
    auto region = at.make({.reserve = 8_GiB});
    region.grow(tier::host, 2_GiB);
    {
      const nccl_window small(on, region);
      EXPECT_EQ(on.window_bytes_taken(), 2_GiB);
      auto other = at.make({.reserve = 8_GiB});
      other.grow(tier::host, 2_GiB - 2_MiB);
      other.grow(tier::device, 4_MiB);
      EXPECT_THAT(thrown_by_all(*at.ranks, [&] { nccl_window(on, other); }),
                  AllOf(StartsWith("unsupported"), HasSubstr("4.0 GiB"), HasSubstr("2.0 GiB"),
                        HasSubstr("NCCL_WIN_STRIDE")));
      EXPECT_NE(small.at(0).window, nullptr);
    }
    EXPECT_EQ(on.window_bytes_taken(), 0u);
    on.close();
  });
}

TEST(nccl_communicator, is_not_closed_under_its_windows) {
  const nccl_fixture fake({.version = 23007});
  run_nccl_ranks(2, [](const rank_context& at) {
    nccl_communicator on(at.ranks, at.on);
    auto region = at.make();
    region.grow(tier::device, 2_MiB);
    {
      const nccl_window window(on, region);
      EXPECT_THAT(thrown_by_all(*at.ranks, [&] { on.close(); }), HasSubstr("1 window"));
    }
    on.close();
  });
}

TEST(nccl_communicator, is_not_closed_under_a_window_of_one_rank) {
  const nccl_fixture fake({.version = 23007});
  run_nccl_ranks(
      2,
      [](const rank_context& at) {
        nccl_communicator on(at.ranks, at.on);
        auto region = at.make();
        region.grow(tier::device, 2_MiB);
        std::optional<nccl_window> window(std::in_place, on, region);
        if (at.ranks->rank() == rank_id{0}) window.reset();
        EXPECT_THAT(thrown_by_all(*at.ranks, [&] { on.close(); }),
                    StartsWith("invalid_argument: rank 1: 1 window"));
        window.reset();
        EXPECT_EQ(thrown_by_all(*at.ranks, [&] { on.close(); }), "");
      },
      std::chrono::milliseconds(3000));
}

TEST(nccl_communicator, one_that_one_rank_cannot_close_is_broken_on_all) {
  const nccl_fixture fake({.version = 23007, .fail_rank = 1, .fail_finalize = 1});
  run_nccl_ranks(2, [](const rank_context& at) {
    nccl_communicator on(at.ranks, at.on);
    EXPECT_THAT(thrown_by_all(*at.ranks, [&] { on.close(); }),
                AllOf(StartsWith("driver_error: rank 1: ncclCommFinalize")));
    EXPECT_THAT(thrown_by_all(*at.ranks, [&] { (void)on.get(); }),
                AllOf(StartsWith("peer_error"), HasSubstr("broken"), HasSubstr("Finalize")));
    EXPECT_THAT(thrown_by_all(*at.ranks, [&] { on.close(); }), HasSubstr("broken"));
  });
}

TEST(nccl_communicator, a_rank_without_room_for_a_window_is_told_to_all) {
  const nccl_fixture fake({.version = 23007});
  const scoped_variable stride("NCCL_WIN_STRIDE", "1");  // one unit
  run_nccl_ranks(
      2,
      [](const rank_context& at) {
        nccl_communicator on(at.ranks, at.on);
        auto region = at.make({.reserve = 8_GiB});
        region.grow(tier::host, 3_GiB);
        std::optional<nccl_window> first(std::in_place, on, region);
        if (at.ranks->rank() == rank_id{0}) first.reset();
        EXPECT_THAT(thrown_by_all(*at.ranks, [&] { nccl_window(on, region); }),
                    AllOf(StartsWith("unsupported: rank 1: "), HasSubstr("NCCL_WIN_STRIDE")));
        first.reset();
        EXPECT_EQ(thrown_by_all(*at.ranks, [&] { nccl_window(on, region); }), "");
        on.close();
      },
      std::chrono::milliseconds(3000));
}

}  // namespace
}  // namespace evmm::test
