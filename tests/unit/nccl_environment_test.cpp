// SPDX-License-Identifier: Apache-2.0
// What a process can tell NCCL once, before its first communicator. Each test is a process whose
// first it is.
#include "tests/support/in_child.hpp"
#include "tests/support/nccl_ranks.hpp"

#include <evmm/error.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

namespace evmm::test {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

TEST(nccl_environment, is_as_it_was_after_a_communicator_that_did_not_begin) {
  in_child({}, [] {
    const nccl_fixture fake({.version = 23007});
    run_nccl_ranks(2, [](const rank_context& at) {
      const device_id none{at.ranks->rank().value * 7};
      EXPECT_THAT(
          thrown_by_all(
              *at.ranks,
              [&] { nccl_communicator(at.ranks, at.on, {.device = none, .window_bytes = 8_GiB}); }),
          StartsWith("invalid_argument: rank 1: DEVICE 7 does not exist"));
      EXPECT_EQ(std::getenv("NCCL_WIN_STRIDE"), nullptr);
      at.ranks->barrier();
      nccl_communicator on(at.ranks, at.on, {.window_bytes = 16_GiB});
      EXPECT_EQ(on.window_bytes(), 16_GiB);
      EXPECT_STREQ(std::getenv("NCCL_WIN_STRIDE"), "17179869184");
      on.close();
    });
  });
}

TEST(nccl_environment, stays_as_nccl_has_read_it) {
  in_child({}, [] {
    const nccl_fixture fake({.version = 23007, .fail_rank = 0, .fail_init = 1});
    run_nccl_ranks(1, [](const rank_context& at) {
      EXPECT_THAT(thrown_by([&] { nccl_communicator(at.ranks, at.on, {.window_bytes = 8_GiB}); }),
                  HasSubstr("ncclCommInitRankConfig"));
      EXPECT_THAT(thrown_by([&] { nccl_communicator(at.ranks, at.on, {.window_bytes = 16_GiB}); }),
                  HasSubstr("window_bytes is 16.0 GiB, but NCCL has read its environment, with "
                            "NCCL_WIN_STRIDE=8589934592 (8.0 GiB); help: give the process's first "
                            "communicator the largest window_bytes"));
      nccl_communicator(at.ranks, at.on, {.window_bytes = 8_GiB}).close();
    });
  });
}

TEST(nccl_environment, has_no_place_for_more_than_all_addresses) {
  in_child({}, [] {
    const nccl_fixture fake({.version = 23007});
    run_nccl_ranks(1, [](const rank_context& at) {
      EXPECT_THAT(
          thrown_by([&] { nccl_communicator(at.ranks, at.on, {.window_bytes = ~std::size_t{0}}); }),
          HasSubstr("invalid_argument: rank 0: 18446744073709551615 bytes overflow"));
    });
  });
}

TEST(nccl_environment, that_is_set_and_too_small_is_named_before_nccl_reads_it) {
  in_child({{"NCCL_WIN_STRIDE", "8589934592"}}, [] {
    const nccl_fixture fake({.version = 23007});
    run_nccl_ranks(1, [](const rank_context& at) {
      EXPECT_THAT(thrown_by([&] { nccl_communicator(at.ranks, at.on, {.window_bytes = 16_GiB}); }),
                  HasSubstr("window_bytes is 16.0 GiB, but NCCL_WIN_STRIDE=8589934592 (8.0 GiB); "
                            "help: unset NCCL_WIN_STRIDE or raise it"));
    });
  });
}

}  // namespace
}  // namespace evmm::test
