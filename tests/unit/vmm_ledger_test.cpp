// SPDX-License-Identifier: Apache-2.0
#include "lib/driver/cuda/vmm_ledger.hpp"

#include <evmm/error.hpp>
#include <evmm/units.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace evmm {
namespace {

using namespace evmm::units;
using testing::HasSubstr;

constexpr address k_base = 0x7f0000000000;
constexpr memory_location k_device = memory_location::on(device_id{0});
constexpr memory_location k_host = memory_location::on(numa_node{0});
constexpr allocation_handle k_one{1};
constexpr allocation_handle k_two{2};

template <class Call>
std::string refusal(Call&& call) {
  try {
    call();
  } catch (const invalid_argument& failure) {
    return failure.what();
  }
  return "no refusal";
}

/// A range of 16 MiB; handle 1 has 4 MiB of DEVICE memory, handle 2 has 2 MiB of HOST_NUMA.
class ledger_test : public testing::Test {
 protected:
  void SetUp() override {
    ledger.add_range(k_base, 16_MiB);
    ledger.add_handle(k_one, {.bytes = 4_MiB, .where = k_device}, false);
    ledger.add_handle(k_two, {.bytes = 2_MiB, .where = k_host}, false);
  }
  vmm_ledger ledger;
};

TEST_F(ledger_test, a_range_goes_back_whole_and_empty) {
  EXPECT_THAT(refusal([&] { ledger.remove_range(k_base + 2_MiB, 14_MiB); }),
              HasSubstr("no range was reserved there"));
  EXPECT_THAT(refusal([&] { ledger.remove_range(k_base, 8_MiB); }), HasSubstr("16.0 MiB were"));
  ledger.add_mapping(k_base + 12_MiB, 4_MiB, k_one);
  EXPECT_THAT(refusal([&] { ledger.remove_range(k_base, 16_MiB); }), HasSubstr("still mapped"));
  ledger.remove_mapping(k_base + 12_MiB, 4_MiB);
  ledger.remove_range(k_base, 16_MiB);
  EXPECT_EQ(ledger.alive().ranges, 0u);
}

TEST_F(ledger_test, a_mapping_lies_inside_one_range) {
  EXPECT_THAT(refusal([&] { ledger.add_mapping(k_base - 2_MiB, 4_MiB, k_one); }),
              HasSubstr("no range is reserved there"));
  EXPECT_THAT(refusal([&] { ledger.add_mapping(k_base + 14_MiB, 4_MiB, k_one); }),
              HasSubstr("ends outside the reserved"));
  // Two ranges side by side are not one.
  ledger.add_range(k_base + 16_MiB, 16_MiB);
  EXPECT_THAT(refusal([&] { ledger.add_mapping(k_base + 14_MiB, 4_MiB, k_one); }),
              HasSubstr("ends outside the reserved"));
}

TEST_F(ledger_test, a_handle_is_mapped_whole_and_never_over_another) {
  EXPECT_THAT(refusal([&] { ledger.add_mapping(k_base, 2_MiB, k_one); }),
              HasSubstr("mapped whole"));
  ledger.add_mapping(k_base + 4_MiB, 4_MiB, k_one);
  for (const address at : {k_base + 2_MiB, k_base + 4_MiB, k_base + 6_MiB}) {
    EXPECT_THAT(refusal([&] { ledger.add_mapping(at, 4_MiB, k_one); }), HasSubstr("are mapped"));
  }
  ledger.add_mapping(k_base + 2_MiB, 2_MiB, k_two);  // fits just before
  ledger.add_mapping(k_base + 8_MiB, 4_MiB, k_one);  // and the same handle just after
  EXPECT_EQ(ledger.alive().mappings, 3u);
}

TEST_F(ledger_test, a_mapping_goes_whole_and_can_be_put_back) {
  ledger.add_mapping(k_base, 4_MiB, k_one);
  EXPECT_THAT(refusal([&] { ledger.remove_mapping(k_base, 2_MiB); }), HasSubstr("goes whole"));
  EXPECT_THAT(refusal([&] { ledger.remove_mapping(k_base + 2_MiB, 2_MiB); }),
              HasSubstr("no mapping begins there"));
  auto taken = ledger.remove_mapping(k_base, 4_MiB);
  EXPECT_EQ(ledger.alive().mappings, 0u);
  ledger.add_back(std::move(taken));
  EXPECT_EQ(ledger.remove_mapping(k_base, 4_MiB).backing->request.bytes, 4_MiB);
}

TEST_F(ledger_test, access_covers_whole_mappings_without_holes) {
  ledger.add_mapping(k_base, 4_MiB, k_one);
  ledger.add_mapping(k_base + 4_MiB, 2_MiB, k_two);
  ledger.check_access(k_base, 6_MiB, false);
  EXPECT_THAT(refusal([&] { ledger.check_access(k_base + 2_MiB, 4_MiB, false); }),
              HasSubstr("no mapping begins at"));
  EXPECT_THAT(refusal([&] { ledger.check_access(k_base, 2_MiB, false); }),
              HasSubstr("ends inside a mapping"));
  EXPECT_THAT(refusal([&] { ledger.check_access(k_base, 8_MiB, false); }),
              HasSubstr("no mapping begins at"));
}

TEST_F(ledger_test, cpus_reach_host_memory_only) {
  ledger.add_mapping(k_base, 4_MiB, k_one);
  ledger.add_mapping(k_base + 4_MiB, 2_MiB, k_two);
  ledger.check_access(k_base + 4_MiB, 2_MiB, true);
  EXPECT_THAT(refusal([&] { ledger.check_access(k_base, 6_MiB, true); }),
              HasSubstr("DEVICE 0 backs 4.0 MiB"));
}

TEST_F(ledger_test, work_is_cut_where_memory_of_another_place_begins) {
  ledger.add_mapping(k_base, 4_MiB, k_one);
  ledger.add_mapping(k_base + 4_MiB, 4_MiB, k_one);
  ledger.add_mapping(k_base + 8_MiB, 2_MiB, k_two);
  EXPECT_EQ(ledger.check_work(k_base, 10_MiB, "copy"), 8_MiB);
  EXPECT_EQ(ledger.check_work(k_base + 1_MiB, 9_MiB, "copy"), 7_MiB);
  EXPECT_EQ(ledger.check_work(k_base + 1_MiB, 2_MiB, "copy"), 2_MiB);
  EXPECT_EQ(ledger.check_work(k_base + 7_MiB, 2_MiB, "copy"), 1_MiB);
  EXPECT_EQ(ledger.bytes_in_one_place(k_base + 1_MiB, 9_MiB), 7_MiB);
  EXPECT_EQ(ledger.bytes_in_one_place(k_base + 8_MiB, 6_MiB), 2_MiB);
  EXPECT_EQ(ledger.bytes_in_one_place(k_base + 10_MiB, 6_MiB), 6_MiB) << "in no mapping";
  EXPECT_EQ(ledger.bytes_in_one_place(k_base - 8_MiB, 6_MiB), 6_MiB) << "ordinary memory";
  EXPECT_EQ(ledger.check_work(k_base - 8_MiB, 6_MiB, "copy"), 6_MiB) << "ordinary memory";
}

TEST_F(ledger_test, work_that_runs_off_its_mappings_is_refused) {
  ledger.add_mapping(k_base, 4_MiB, k_one);
  ledger.add_mapping(k_base + 6_MiB, 2_MiB, k_two);
  EXPECT_EQ(ledger.check_work(k_base, 4_MiB, "copy"), 4_MiB);
  EXPECT_THAT(refusal([&] { ledger.check_work(k_base, 5_MiB, "copy to"); }),
              HasSubstr("cannot copy to 5.0 MiB at 0x7f0000000000: nothing is mapped from "
                        "0x7f0000400000 on"));
  EXPECT_THAT(refusal([&] { ledger.check_work(k_base + 7_MiB, 2_MiB, "fill"); }),
              HasSubstr("nothing is mapped from 0x7f0000800000 on"));
}

TEST_F(ledger_test, memory_is_held_until_the_last_handle_and_mapping_are_gone) {
  ledger.add_mapping(k_base, 4_MiB, k_one);
  ledger.add_mapping(k_base + 8_MiB, 4_MiB, k_one);
  EXPECT_EQ(ledger.held(k_device), 4_MiB);
  ledger.remove_handle(k_one);
  ledger.remove_mapping(k_base, 4_MiB);
  EXPECT_EQ(ledger.held(k_device), 4_MiB);
  ledger.remove_mapping(k_base + 8_MiB, 4_MiB);
  EXPECT_EQ(ledger.held(k_device), 0u);
  EXPECT_EQ(ledger.held(k_host), 2_MiB);
}

TEST_F(ledger_test, imports_are_held_by_their_owner) {
  ledger.add_handle(allocation_handle{3}, {.bytes = 8_MiB, .where = k_device}, true);
  EXPECT_EQ(ledger.held(k_device), 4_MiB);
}

TEST_F(ledger_test, a_handle_given_twice_is_released_twice) {
  ledger.add_handle(k_one, {.bytes = 4_MiB, .where = k_device}, true);
  ledger.remove_handle(k_one);
  EXPECT_EQ(ledger.find(k_one)->request.bytes, 4_MiB);
  ledger.add_back(k_one, ledger.remove_handle(k_one));
  ledger.remove_handle(k_one);
  EXPECT_THAT(refusal([&] { ledger.remove_handle(k_one); }), HasSubstr("was released"));
  EXPECT_THAT(refusal([&] { ledger.add_mapping(k_base, 4_MiB, k_one); }),
              HasSubstr("was released"));
}

}  // namespace
}  // namespace evmm
