// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/lost_rank.hpp"

#include <evmm/comm/symmetric_channel.hpp>
#include <evmm/comm/symmetric_region.hpp>
#include <evmm/units.hpp>

#include <chrono>
#include <csignal>
#include <memory>
#include <optional>
#include <string>
#include <utility>

// A rank that is killed while a symmetric region grows, and what the others must make of it.

namespace evmm::test {

/// Passes every step on to another bootstrap, and kills its process instead of coming to one.
class deadly_bootstrap final : public bootstrap {
 public:
  explicit deadly_bootstrap(std::shared_ptr<bootstrap> inner)
      : bootstrap(inner->rank(), inner->size()), inner_(std::move(inner)) {
    std::vector<std::string> hosts;
    for (const int node : inner_->nodes()) hosts.push_back(std::to_string(node));
    set_nodes(hosts);
  }
  /// Counted from now on: 0 is the next step.
  void die_at(int step) { left_ = step; }
  std::shared_ptr<node_link> make_link() override { return inner_->make_link(); }

 private:
  std::vector<std::vector<std::byte>> gather(std::span<const std::byte> mine,
                                             std::chrono::steady_clock::time_point,
                                             std::string_view step) override {
    if (left_ && (*left_)-- == 0) std::raise(SIGKILL);
    inner_->set_timeout(timeout());
    return inner_->all_gather(mine, step);
  }

  std::shared_ptr<bootstrap> inner_;
  std::optional<int> left_;
};

/// Where in a growth the rank is killed: instead of coming to one of its collective steps, or in
/// the exchange of handles between two of them.
struct growth_death {
  std::string name;
  int step = 0;
  std::optional<death> in_exchange = std::nullopt;
};
inline std::vector<growth_death> growth_deaths() {
  return {{"propose", 0},
          {"prepare", 1},
          {"quiesce", 2},
          {"map", 3},
          {"export", -1, death::at_its_export},
          {"import", -1, death::at_its_import}};
}

/// One rank of a job in which `victim` dies in a growth of a region that has grown before. Returns
/// what is wrong with how the rank saw it, empty when all is as it must be; does not return on the
/// victim.
inline std::string see_a_growth_lose_a_rank(const std::shared_ptr<bootstrap>& job, rank_id victim,
                                            const growth_death& when) {
  using namespace evmm::units;
  // Grown once, so that an exchange takes place before the one in which the rank dies.
  constexpr std::chrono::milliseconds timeout{1500};
  const auto ranks = std::make_shared<deadly_bootstrap>(job);
  const std::shared_ptr<driver> machine = host_driver::make({});
  const bool dies = ranks->rank() == victim;
  std::shared_ptr<driver> on = machine;
  if (dies && when.in_exchange) on = std::make_shared<deadly_driver>(machine, *when.in_exchange, 1);
  symmetric_region region(ranks, on, {.reserve = 64_MiB});
  region.grow(tier::device, 2_MiB);
  const std::size_t peers = ranks->node_ranks().size();
  for (std::size_t r = 0; r < peers; ++r) {
    region.local()[r] = static_cast<std::byte>(ranks->rank().value);
  }
  ranks->barrier();
  ranks->set_timeout(timeout);
  if (dies && !when.in_exchange) ranks->die_at(when.step);

  const auto since = std::chrono::steady_clock::now();
  const auto said = thrown_by([&] { region.grow(tier::device, 2_MiB); });
  const auto again = thrown_by([&] { region.grow(tier::device, 2_MiB); });
  const auto took = std::chrono::steady_clock::now() - since;
  const auto name = "rank " + std::to_string(victim.value);
  if (said.find(name) == std::string::npos ||
      (said.rfind("timed_out: ", 0) != 0 && said.rfind("peer_error: ", 0) != 0)) {
    return "the growth did not name " + name + ": '" + said + "'";
  }
  if (again.rfind("peer_error: ", 0) != 0) return "it was tried again: '" + again + "'";
  // A change is given a second more than the bootstrap's own time.
  if (took > timeout + std::chrono::milliseconds(4500)) return "it took too long";
  if (region.size() != 2_MiB || region.epoch() != 1) return "the region is not what it was";
  for (const rank_id peer : ranks->node_ranks()) {
    if (region.peer(peer)[0] != static_cast<std::byte>(peer.value))
      return "its memory is not intact";
  }
  region.close();
  return {};
}

/// The same for a channel whose victim dies before a barrier, on whichever node it is.
inline std::string see_a_channel_lose_a_rank(const std::shared_ptr<bootstrap>& ranks,
                                             rank_id victim) {
  using namespace evmm::units;
  constexpr std::chrono::milliseconds timeout{1500};
  const std::shared_ptr<driver> on = host_driver::make({});
  symmetric_region region(ranks, on, {.reserve = 64_MiB});
  region.grow(tier::device, 2_MiB);
  symmetric_channel channel(region);
  const native_stream stream = on->create_stream({0});
  channel.barrier(stream);
  channel.synchronize(stream);
  if (ranks->rank() == victim) std::raise(SIGKILL);
  ranks->set_timeout(timeout);
  const auto since = std::chrono::steady_clock::now();
  const auto said = thrown_by([&] {
    channel.barrier(stream);
    channel.synchronize(stream);
  });
  const auto took = std::chrono::steady_clock::now() - since;
  on->destroy_stream(stream);
  const auto expected =
      "timed_out: rank " + std::to_string(victim.value) + " did not signal barrier 2";
  if (said.rfind(expected, 0) != 0) return "the barrier said '" + said + "'";
  if (took > timeout + std::chrono::milliseconds(3000)) return "it took too long";
  // The bootstrap knows nothing of it yet, and would end MPI together with the dead rank.
  const auto missed = thrown_by([&] { ranks->barrier("after the loss"); });
  return missed.empty() ? "the bootstrap did not miss the rank" : std::string();
}

}  // namespace evmm::test
