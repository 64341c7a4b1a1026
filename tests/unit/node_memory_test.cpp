// SPDX-License-Identifier: Apache-2.0
#include "lib/support/node_memory.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace evmm {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

TEST(node_memory, kernel_lists) {
  EXPECT_THAT(parse_kernel_list("0\n"), ElementsAre(0));
  EXPECT_THAT(parse_kernel_list("0,2-4,9\n"), ElementsAre(0, 2, 3, 4, 9));
  EXPECT_THAT(parse_kernel_list("\n"), IsEmpty());
  EXPECT_THAT(parse_kernel_list(""), IsEmpty());
  EXPECT_THAT(parse_kernel_list("none"), IsEmpty());
  EXPECT_THAT(parse_kernel_list("4-2"), IsEmpty());
}

TEST(node_memory, free_counts_what_the_kernel_gives_up) {
  const auto usage = parse_node_meminfo(
      "Node 1 MemTotal:        1000 kB\n"
      "Node 1 MemFree:          100 kB\n"
      "Node 1 Active:           999 kB\n"
      "Node 1 Active(file):      20 kB\n"
      "Node 1 Inactive(file):    30 kB\n"
      "Node 1 KReclaimable:      77 kB\n"
      "Node 1 SReclaimable:       5 kB\n");
  ASSERT_TRUE(usage);
  EXPECT_EQ(usage->total_bytes, 1000u << 10);
  EXPECT_EQ(usage->free_bytes, 155u << 10);
}

TEST(node_memory, the_whole_machine_reads_the_same) {
  const auto usage = parse_node_meminfo("MemTotal:  1000 kB\nMemFree:  100 kB\n");
  ASSERT_TRUE(usage);
  EXPECT_EQ(usage->free_bytes, 100u << 10);
}

TEST(node_memory, what_is_not_meminfo_is_nothing) {
  EXPECT_FALSE(parse_node_meminfo(""));
  EXPECT_FALSE(parse_node_meminfo("Node 0 MemTotal: \n"));
}

TEST(node_memory, this_machine_has_a_node_with_memory) {
  const auto nodes = nodes_with_memory();
  ASSERT_FALSE(nodes.empty());
  const auto usage = node_memory(nodes.front());
  ASSERT_TRUE(usage);
  EXPECT_GT(usage->total_bytes, 0u);
  EXPECT_LE(usage->free_bytes, usage->total_bytes);
  EXPECT_FALSE(node_memory(numa_node{4096}));
}

TEST(node_memory, without_sysfs_all_memory_is_node_0) {
  EXPECT_THAT(nodes_with_memory("/nonexistent"), ElementsAre(numa_node{0}));
  EXPECT_FALSE(sysfs_lists_nodes("/nonexistent"));
  EXPECT_TRUE(node_memory(numa_node{0}, "/nonexistent"));
  EXPECT_FALSE(node_memory(numa_node{1}, "/nonexistent"));
}

}  // namespace
}  // namespace evmm
