// SPDX-License-Identifier: Apache-2.0
#include <evmm/error.hpp>
#include <evmm/host_driver.hpp>
#include <evmm/physical_memory.hpp>
#include <evmm/topology.hpp>
#include <evmm/units.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace evmm {
namespace {

using namespace evmm::units;
using policy = host_placement::policy;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr numa_node operator""_node(unsigned long long number) {
  return numa_node{static_cast<int>(number)};
}

constexpr device_id k_device{0};

topology recorded(const std::string& name) {
  return topology::from_xml(EVMM_TOPOLOGIES "/" + name + ".xml");
}

/// A driver with these nodes, each of one granule: one handle fills a node.
std::shared_ptr<driver> driver_with(std::vector<int> nodes, int devices = 1) {
  return host_driver::make({.devices = devices, .host_bytes = 2_MiB, .numa_nodes = nodes});
}

template <class Error>
std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& failure) {
    return failure.what();
  }
  ADD_FAILURE() << "did not throw";
  return {};
}

TEST(choose_nodes_nearest, takes_the_first_candidate_that_proves) {
  const auto on = driver_with({0, 1});
  const auto choice = choose_nodes(*on, recorded("two_sockets"), k_device);
  EXPECT_THAT(choice.nodes, ElementsAre(0_node));
  ASSERT_THAT(choice.considered, SizeIs(2));
  EXPECT_TRUE(choice.considered[0].proved);
  EXPECT_FALSE(choice.considered[1].proved);
  EXPECT_EQ(choice.considered[1].refusal, "");
  EXPECT_EQ(choice.text, "HOST_NUMA 0 for DEVICE 0: the driver's hint (proved)");
}

TEST(choose_nodes_nearest, gives_back_what_it_proved_with) {
  const auto on = driver_with({0, 1});
  choose_nodes(*on, recorded("two_sockets"), k_device, {.how = policy::interleave});
  EXPECT_EQ(on->usage(memory_location::on(0_node)).free_bytes, 2_MiB);
  EXPECT_EQ(on->usage(memory_location::on(1_node)).free_bytes, 2_MiB);
}

TEST(choose_nodes_nearest, goes_on_when_a_node_is_full_and_reports_why) {
  const auto on = driver_with({0, 1});
  const physical_memory filler(*on, {.bytes = 2_MiB, .where = memory_location::on(0_node)});
  const auto choice = choose_nodes(*on, recorded("two_sockets"), k_device);
  EXPECT_THAT(choice.nodes, ElementsAre(1_node));
  EXPECT_THAT(choice.considered[0].refusal, HasSubstr("out_of_memory"));
  EXPECT_THAT(choice.text,
              AllOf(HasSubstr("HOST_NUMA 1 for DEVICE 0: allowed node at distance 21 from "
                              "HOST_NUMA 0 (proved); not HOST_NUMA 0 (the driver's hint): "),
                    HasSubstr("out_of_memory")));
}

TEST(choose_nodes_nearest, takes_nodes_that_only_the_driver_knows) {
  const auto on = driver_with({0, 1}, 2);
  const auto machine = recorded("one_node_unknown_pci");
  EXPECT_THAT(choose_nodes(*on, machine, device_id{0}).nodes, ElementsAre(0_node));
  EXPECT_THAT(choose_nodes(*on, machine, device_id{1}).nodes, ElementsAre(1_node));
  const auto all = choose_nodes(*on, machine, device_id{0}, {.how = policy::interleave});
  EXPECT_THAT(all.nodes, ElementsAre(0_node, 1_node));
  EXPECT_EQ(all.considered[1].reason, "offered by the driver, unknown to hwloc");
}

TEST(choose_nodes_nearest, stays_within_what_is_allowed) {
  const auto on = driver_with({0, 1});
  const auto machine = recorded("restricted_cpuset");
  EXPECT_THAT(choose_nodes(*on, machine, k_device).nodes, ElementsAre(1_node));
  EXPECT_THAT(choose_nodes(*on, machine, k_device, {.how = policy::interleave}).nodes,
              ElementsAre(1_node));
}

TEST(choose_nodes_nearest, takes_no_list) {
  const auto on = driver_with({0, 1});
  EXPECT_THROW(choose_nodes(*on, recorded("two_sockets"), k_device, {.nodes = {1_node}}),
               invalid_argument);
}

TEST(choose_nodes_nearest, lists_every_refusal_when_none_serves) {
  const auto on = driver_with({});
  const auto text =
      message_of<unsupported>([&] { choose_nodes(*on, recorded("two_sockets"), k_device); });
  EXPECT_THAT(text, AllOf(HasSubstr("DEVICE 0"), HasSubstr("HOST_NUMA 0 (allowed node"),
                          HasSubstr("HOST_NUMA 1 (allowed node"), HasSubstr("help")));
}

TEST(choose_nodes_nearest, refuses_a_device_that_does_not_exist) {
  const auto on = driver_with({0});
  EXPECT_THROW(choose_nodes(*on, recorded("two_sockets"), device_id{3}), invalid_argument);
}

TEST(choose_nodes_bind, uses_the_first_of_the_list_that_proves) {
  const auto on = driver_with({0, 1});
  const auto machine = recorded("two_sockets");
  const host_placement wish = {.how = policy::bind, .nodes = {1_node, 0_node}};
  EXPECT_THAT(choose_nodes(*on, machine, k_device, wish).nodes, ElementsAre(1_node));
  const physical_memory filler(*on, {.bytes = 2_MiB, .where = memory_location::on(1_node)});
  const auto second = choose_nodes(*on, machine, k_device, wish);
  EXPECT_THAT(second.nodes, ElementsAre(0_node));
  EXPECT_THAT(second.text, HasSubstr("HOST_NUMA 0 for DEVICE 0: asked for (proved); not"));
}

TEST(choose_nodes_bind, never_leaves_the_list) {
  const auto on = driver_with({0});
  const auto text = message_of<unsupported>([&] {
    choose_nodes(*on, recorded("two_sockets"), k_device, {.how = policy::bind, .nodes = {1_node}});
  });
  EXPECT_THAT(text, HasSubstr("HOST_NUMA 1 (asked for): invalid_argument"));
}

TEST(choose_nodes_bind, accepts_a_node_that_only_the_driver_knows) {
  const auto on = driver_with({0, 3});
  const auto choice = choose_nodes(*on, recorded("one_node_unknown_pci"), k_device,
                                   {.how = policy::bind, .nodes = {3_node}});
  EXPECT_THAT(choice.nodes, ElementsAre(3_node));
}

TEST(choose_nodes_bind, names_an_unknown_node_and_lists_those_that_exist) {
  const auto on = driver_with({0, 1});
  const auto text = message_of<invalid_argument>([&] {
    choose_nodes(*on, recorded("cpuless_node"), k_device, {.how = policy::bind, .nodes = {9_node}});
  });
  EXPECT_THAT(text,
              AllOf(HasSubstr("HOST_NUMA 9 does not exist"), HasSubstr("0 (256.0 GiB)"),
                    HasSubstr("2 (512.0 GiB, memory only)"), HasSubstr("the driver offers 0, 1")));
}

TEST(choose_nodes_bind, refuses_a_node_that_is_not_allowed) {
  const auto on = driver_with({0, 1});
  const auto text = message_of<invalid_argument>([&] {
    choose_nodes(*on, recorded("restricted_cpuset"), k_device,
                 {.how = policy::bind, .nodes = {1_node, 0_node}});
  });
  EXPECT_THAT(text, HasSubstr("HOST_NUMA 0 is not allowed for this process"));
}

TEST(choose_nodes_bind, needs_a_list) {
  const auto on = driver_with({0});
  EXPECT_THROW(choose_nodes(*on, recorded("two_sockets"), k_device, {.how = policy::bind}),
               invalid_argument);
}

TEST(choose_nodes_interleave, takes_all_allowed_nodes_nearest_first) {
  // Device 1 of 2 has the upper half of the nodes: its hint is node 4.
  const auto on = driver_with({0, 1, 2, 3, 4, 5, 6, 7}, 2);
  const auto choice =
      choose_nodes(*on, recorded("four_nodes_a_socket"), device_id{1}, {.how = policy::interleave});
  EXPECT_THAT(choice.nodes,
              ElementsAre(4_node, 5_node, 6_node, 7_node, 0_node, 1_node, 2_node, 3_node));
  EXPECT_THAT(choice.text, HasSubstr("HOST_NUMA 4, 5, 6, 7, 0, 1, 2, 3 for DEVICE 1, interleaved; "
                                     "4: the driver's hint (proved); 5: allowed node at"));
}

TEST(choose_nodes_interleave, keeps_the_order_and_weight_of_a_list) {
  const auto on = driver_with({0, 1});
  const auto choice = choose_nodes(*on, recorded("two_sockets"), k_device,
                                   {.how = policy::interleave, .nodes = {1_node, 0_node, 1_node}});
  EXPECT_THAT(choice.nodes, ElementsAre(1_node, 0_node, 1_node));
}

TEST(choose_nodes_interleave, leaves_out_nodes_that_do_not_serve) {
  const auto on = driver_with({0, 1});
  const auto choice = choose_nodes(*on, recorded("cpuless_node"), k_device,
                                   {.how = policy::interleave, .nodes = {0_node, 2_node, 1_node}});
  EXPECT_THAT(choice.nodes, ElementsAre(0_node, 1_node));
  EXPECT_THAT(choice.text, HasSubstr("not HOST_NUMA 2 (asked for): "));
}

TEST(choose_nodes_interleave, passes_over_nodes_that_the_driver_does_not_have) {
  const auto on = driver_with({2, 7});
  const auto choice =
      choose_nodes(*on, recorded("four_nodes_a_socket"), k_device, {.how = policy::interleave});
  EXPECT_THAT(choice.nodes, ElementsAre(2_node, 7_node));
  EXPECT_THAT(choice.considered, SizeIs(8));
}

TEST(choose_nodes_here, works_on_this_machine) {
  const auto on = host_driver::make({});
  const auto choice = choose_nodes(*on, topology::load(), k_device);
  EXPECT_THAT(choice.nodes, SizeIs(1));
}

}  // namespace
}  // namespace evmm
