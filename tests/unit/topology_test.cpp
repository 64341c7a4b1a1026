// SPDX-License-Identifier: Apache-2.0
#include <evmm/error.hpp>
#include <evmm/topology.hpp>
#include <evmm/units.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace evmm {
namespace {

using namespace evmm::units;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr numa_node operator""_node(unsigned long long number) {
  return numa_node{static_cast<int>(number)};
}

topology recorded(const std::string& name) {
  return topology::from_xml(EVMM_TOPOLOGIES "/" + name + ".xml");
}

device_description device_at(std::string pci_bus_id, std::optional<numa_node> hint = {}) {
  device_description device;
  device.pci_bus_id = std::move(pci_bus_id);
  device.host_node = hint;
  return device;
}

std::vector<numa_node> order_of(const std::vector<node_candidate>& candidates) {
  std::vector<numa_node> order;
  for (const auto& candidate : candidates) {
    EXPECT_FALSE(candidate.reason.empty());
    EXPECT_FALSE(candidate.proved);
    order.push_back(candidate.node);
  }
  return order;
}

TEST(topology_two_sockets, lists_nodes_with_capacity_and_processors) {
  const auto nodes = recorded("two_sockets").nodes();
  ASSERT_THAT(nodes, SizeIs(2));
  for (int i = 0; i < 2; ++i) {
    const auto& node = nodes[static_cast<std::size_t>(i)];
    EXPECT_EQ(node.node.value, i);
    EXPECT_EQ(node.bytes, 256_GiB);
    EXPECT_EQ(node.processors, 2);
    EXPECT_TRUE(node.allowed);
  }
}

TEST(topology_two_sockets, knows_distances) {
  const auto machine = recorded("two_sockets");
  EXPECT_EQ(machine.distance(0_node, 0_node), 10);
  EXPECT_EQ(machine.distance(0_node, 1_node), 21);
  EXPECT_EQ(machine.distance(0_node, 2_node), std::nullopt);
  EXPECT_EQ(machine.distance(7_node, 7_node), std::nullopt);
}

TEST(topology_two_sockets, finds_the_node_of_each_gpu) {
  const auto machine = recorded("two_sockets");
  EXPECT_THAT(machine.local_nodes("0000:1b:00.0"), ElementsAre(0_node));
  EXPECT_THAT(machine.local_nodes("0000:2C:00.0"), ElementsAre(0_node));
  EXPECT_THAT(machine.local_nodes("0000:ad:00.0"), ElementsAre(1_node));
}

TEST(topology_two_sockets, knows_nothing_of_devices_that_are_not_there) {
  const auto machine = recorded("two_sockets");
  EXPECT_THAT(machine.local_nodes("0000:ff:00.0"), IsEmpty());
  EXPECT_THAT(machine.local_nodes(""), IsEmpty());
  EXPECT_THAT(machine.local_nodes("not a bus id"), IsEmpty());
}

TEST(topology_two_sockets, prefers_locality_to_the_drivers_hint) {
  const auto found = recorded("two_sockets").candidates(device_at("0000:9b:00.0", 0_node));
  EXPECT_THAT(order_of(found), ElementsAre(1_node, 0_node));
  EXPECT_EQ(found[0].reason, "hwloc: local to PCI 0000:9b:00.0");
  EXPECT_EQ(found[1].reason, "the driver's hint");
}

TEST(topology_two_sockets, reports_the_distance_of_what_is_not_local) {
  const auto found = recorded("two_sockets").candidates(device_at("0000:9b:00.0"));
  EXPECT_THAT(order_of(found), ElementsAre(1_node, 0_node));
  EXPECT_EQ(found[1].reason, "allowed node at distance 21 from HOST_NUMA 1");
}

TEST(topology_two_sockets, takes_the_hint_of_a_device_that_hwloc_does_not_see) {
  const auto found = recorded("two_sockets").candidates(device_at("", 1_node));
  EXPECT_THAT(order_of(found), ElementsAre(1_node, 0_node));
  EXPECT_EQ(found[0].reason, "the driver's hint");
}

TEST(topology_two_sockets, keeps_a_hint_that_hwloc_does_not_know_and_drops_minus_one) {
  const auto machine = recorded("two_sockets");
  EXPECT_THAT(order_of(machine.candidates(device_at("", 5_node))),
              ElementsAre(5_node, 0_node, 1_node));
  EXPECT_THAT(order_of(machine.candidates(device_at("", numa_node{-1}))),
              ElementsAre(0_node, 1_node));
}

TEST(topology_four_nodes_a_socket, finds_the_one_node_of_a_gpu) {
  const auto machine = recorded("four_nodes_a_socket");
  EXPECT_THAT(machine.nodes(), SizeIs(8));
  EXPECT_THAT(machine.local_nodes("0000:41:00.0"), ElementsAre(1_node));
  EXPECT_THAT(machine.local_nodes("0000:c1:00.0"), ElementsAre(6_node));
}

TEST(topology_four_nodes_a_socket, stays_on_the_socket_before_it_crosses) {
  const auto machine = recorded("four_nodes_a_socket");
  EXPECT_THAT(order_of(machine.candidates(device_at("0000:c1:00.0"))),
              ElementsAre(6_node, 4_node, 5_node, 7_node, 0_node, 1_node, 2_node, 3_node));
}

TEST(topology_four_nodes_a_socket, lets_the_hint_choose_among_equally_local_nodes) {
  const auto machine = recorded("four_nodes_a_socket");
  EXPECT_THAT(machine.local_nodes("0000:e1:00.0"), ElementsAre(4_node, 5_node, 6_node, 7_node));
  EXPECT_THAT(order_of(machine.candidates(device_at("0000:e1:00.0", 6_node))),
              ElementsAre(6_node, 4_node, 5_node, 7_node, 0_node, 1_node, 2_node, 3_node));
}

TEST(topology_cpuless_node, tells_the_memory_only_node) {
  const auto machine = recorded("cpuless_node");
  const auto nodes = machine.nodes();
  ASSERT_THAT(nodes, SizeIs(3));
  EXPECT_EQ(nodes[0].processors, 2);
  EXPECT_EQ(nodes[1].processors, 2);
  EXPECT_EQ(nodes[2].processors, 0);
  EXPECT_EQ(nodes[2].bytes, 512_GiB);
  EXPECT_THAT(machine.local_nodes("0000:1b:00.0"), ElementsAre(0_node));
}

TEST(topology_cpuless_node, orders_it_by_distance_and_behind_processors_at_equal_distance) {
  const auto machine = recorded("cpuless_node");
  const auto near = machine.candidates(device_at("0000:1b:00.0"));
  EXPECT_THAT(order_of(near), ElementsAre(0_node, 2_node, 1_node));
  EXPECT_EQ(near[1].reason, "allowed node at distance 14 from HOST_NUMA 0, memory only");
  EXPECT_THAT(order_of(machine.candidates(device_at("0000:9b:00.0"))),
              ElementsAre(1_node, 0_node, 2_node));
  // Even where nothing says what is near, processors come first.
  EXPECT_THAT(order_of(machine.candidates(device_at(""))), ElementsAre(0_node, 1_node, 2_node));
}

TEST(topology_one_node_unknown_pci, does_not_pretend_to_know) {
  const auto machine = recorded("one_node_unknown_pci");
  ASSERT_THAT(machine.nodes(), SizeIs(1));
  EXPECT_THAT(machine.local_nodes("0000:0b:00.0"), IsEmpty());
  EXPECT_EQ(machine.distance(0_node, 0_node), 10);
}

TEST(topology_one_node_unknown_pci, falls_back_to_the_hint_and_then_to_the_node) {
  const auto machine = recorded("one_node_unknown_pci");
  const auto hinted = machine.candidates(device_at("0000:0b:00.0", 0_node));
  EXPECT_THAT(order_of(hinted), ElementsAre(0_node));
  EXPECT_EQ(hinted[0].reason, "the driver's hint");
  const auto unhinted = machine.candidates(device_at("0000:0b:00.0"));
  EXPECT_THAT(order_of(unhinted), ElementsAre(0_node));
  EXPECT_EQ(unhinted[0].reason, "allowed node, nothing says which is near");
}

TEST(topology_restricted_cpuset, lists_what_it_may_not_use) {
  const auto nodes = recorded("restricted_cpuset").nodes();
  ASSERT_THAT(nodes, SizeIs(2));
  EXPECT_FALSE(nodes[0].allowed);
  EXPECT_TRUE(nodes[1].allowed);
  EXPECT_EQ(nodes[0].bytes, 256_GiB);
}

TEST(topology_restricted_cpuset, never_proposes_it_and_says_so) {
  const auto machine = recorded("restricted_cpuset");
  const auto found = machine.candidates(device_at("0000:1b:00.0", 0_node));
  EXPECT_THAT(order_of(found), ElementsAre(1_node));
  EXPECT_EQ(found[0].reason,
            "allowed node at distance 21 from HOST_NUMA 0 (near, but not allowed)");
  EXPECT_THAT(order_of(machine.candidates(device_at("0000:9b:00.0"))), ElementsAre(1_node));
}

TEST(topology_load, sees_this_machine) {
  auto machine = topology::load();
  const auto nodes = machine.nodes();
  ASSERT_FALSE(nodes.empty());
  EXPECT_TRUE(std::is_sorted(nodes.begin(), nodes.end(), [](const auto& left, const auto& right) {
    return left.node < right.node;
  }));
  EXPECT_TRUE(std::any_of(nodes.begin(), nodes.end(),
                          [](const auto& node) { return node.allowed && node.processors > 0; }));
  EXPECT_EQ(machine.distance(nodes[0].node, nodes[0].node), 10);
  EXPECT_FALSE(machine.candidates(device_at("")).empty());

  const auto moved = std::move(machine);
  EXPECT_EQ(moved.nodes().size(), nodes.size());
}

TEST(topology_from_xml, names_a_file_that_it_cannot_read) {
  try {
    topology::from_xml("/nowhere/machine.xml");
    FAIL() << "read a file that is not there";
  } catch (const invalid_argument& failure) {
    EXPECT_THAT(failure.what(), AllOf(HasSubstr("/nowhere/machine.xml"), HasSubstr("lstopo")));
  }
}

}  // namespace
}  // namespace evmm
