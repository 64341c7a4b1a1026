// SPDX-License-Identifier: Apache-2.0
// What a rank takes in jobs of 8 to 100,000 ranks, on paper: the code's own functions for what it
// asks for, and its steps counted in a small job of threads. See README.md for the method.
#include "comm/courier.hpp"
#include "comm/footprint.hpp"
#include "comm/gather_plan.hpp"

#include <evmm/comm/bootstrap.hpp>
#include <evmm/comm/symmetric_channel.hpp>
#include <evmm/comm/symmetric_region.hpp>
#include <evmm/host_driver.hpp>
#include <evmm/units.hpp>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <array>
#include <cstdio>
#include <exception>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

namespace evmm {
namespace {

using namespace evmm::units;

/// Collective steps and the bytes that one rank gives to them.
struct steps {
  int count = 0;
  std::size_t bytes = 0;
  friend steps operator-(const steps& a, const steps& b) {
    return {a.count - b.count, a.bytes - b.bytes};
  }
};

/// Counts what passes through another bootstrap.
class counting_bootstrap final : public bootstrap {
 public:
  explicit counting_bootstrap(std::shared_ptr<bootstrap> inner)
      : bootstrap(inner->rank(), inner->size()), inner_(std::move(inner)) {
    const std::vector<std::string> hosts(static_cast<std::size_t>(size()));
    set_nodes(hosts);
  }
  const steps& so_far() const { return so_far_; }

 private:
  std::vector<std::vector<std::byte>> gather(std::span<const std::byte> mine,
                                             std::chrono::steady_clock::time_point,
                                             std::string_view step) override {
    ++so_far_.count;
    so_far_.bytes += mine.size();
    return inner_->all_gather(mine, step);
  }

  std::shared_ptr<bootstrap> inner_;
  steps so_far_;
};

struct counted_steps {
  steps region, growth, channel;
};

/// The steps of two ranks: as many as those of any number.
counted_steps count_steps() {
  const auto meet = make_thread_bootstraps(2);
  counted_steps counted;
  std::array<std::exception_ptr, 2> failed;
  const auto run = [&](std::size_t rank) {
    try {
      const auto ranks = std::make_shared<counting_bootstrap>(meet[rank]);
      symmetric_region region(ranks, host_driver::make({}), {.reserve = 64_MiB});
      const steps made = ranks->so_far();
      region.grow(tier::device, 2_MiB);
      const steps grown = ranks->so_far();
      symmetric_channel channel(region);
      if (rank == 0) counted = {made, grown - made, ranks->so_far() - grown};
      channel.close();
      region.close();
    } catch (...) {
      failed[rank] = std::current_exception();
    }
  };
  {
    const std::jthread other(run, 1);
    run(0);
  }
  for (const auto& failure : failed) {
    if (failure != nullptr) std::rethrow_exception(failure);
  }
  return counted;
}

struct model {
  int ranks_a_node = 8;
  std::size_t segments = 32;
  double reserve_gib = 64;
  double latency_us = 20;
  double bandwidth_gb = 1;
  bool json = false;
};

nlohmann::ordered_json row(int ranks, const model& how, const counted_steps& counted) {
  const gather_plan plan{ranks};
  const auto here = static_cast<std::size_t>(std::min(ranks, how.ranks_a_node));
  const int nodes = (ranks + how.ranks_a_node - 1) / how.ranks_a_node;
  const auto reserve = static_cast<std::size_t>(how.reserve_gib * double(1_GiB));
  // Everybody's blocks, each with its length, come once.
  const auto received = [&](const steps& s) {
    return (s.bytes + static_cast<std::size_t>(s.count) * sizeof(std::size_t)) *
           static_cast<std::size_t>(ranks - 1);
  };
  const auto seconds = [&](const steps& s) {
    return s.count * plan.rounds() * how.latency_us * 1e-6 +
           double(received(s)) / (how.bandwidth_gb * 1e9);
  };
  const channel_options channel;
  return {{"ranks", ranks},
          {"nodes", nodes},
          {"addresses", region_addresses(here, reserve)},
          {"exchange_sockets", exchange_sockets(here)},
          {"imported_handles", imported_handles(here, how.segments)},
          {"bootstrap_neighbours", plan.neighbours()},
          {"neighbours_if_flat", ranks - 1},
          {"messages_a_step", plan.rounds()},
          {"region_steps", counted.region.count},
          {"growth_steps", counted.growth.count},
          {"growth_messages", counted.growth.count * plan.rounds()},
          {"growth_messages_if_flat", std::int64_t(counted.growth.count) * (ranks - 1)},
          {"growth_bytes", received(counted.growth)},
          {"growth_seconds", seconds(counted.growth)},
          {"start_seconds", seconds(counted.region) + seconds(counted.channel)},
          {"channel_words", channel_word_bytes(static_cast<std::size_t>(ranks))},
          {"channel_staging",
           nodes == 1
               ? 0
               : channel_staging_bytes(sizeof(message_head) + channel.chunk_bytes, channel.chunks)},
          {"barrier_messages", std::int64_t(barrier_turns(nodes)) * (ranks - std::int64_t(here))}};
}

void print(const nlohmann::ordered_json& rows, const model& how) {
  fmt::print(
      "One rank of a job with {} ranks a node, {} GiB reserved, {} segments.\n"
      "Times: {} us a message, {} GB/s; a model, not a measurement.\n\n",
      how.ranks_a_node, how.reserve_gib, how.segments, how.latency_us, how.bandwidth_gb);
  fmt::print("{:>7} {:>6} {:>10} {:>8} {:>8} {:>16} {:>18} {:>10} {:>10} {:>9} {:>9} {:>9}\n",
             "ranks", "nodes", "addresses", "sockets", "handles", "neighbours(flat)",
             "growth msgs(flat)", "growth", "growth", "start", "words", "barrier");
  fmt::print("{:>7} {:>6} {:>10} {:>8} {:>8} {:>16} {:>18} {:>10} {:>10} {:>9} {:>9} {:>9}\n", "",
             "", "GiB", "on node", "of peers", "of bootstrap", "", "KiB", "ms", "ms", "KiB",
             "msgs");
  for (const auto& r : rows) {
    const auto number = [&](const char* name) { return r[name].get<double>(); };
    const auto whole = [&](const char* name) { return r[name].get<std::int64_t>(); };
    fmt::print(
        "{:>7} {:>6} {:>10.0f} {:>8} {:>8} {:>16} {:>18} {:>10.0f} {:>10.2f} {:>9.2f} {:>9.0f} "
        "{:>9}\n",
        whole("ranks"), whole("nodes"), number("addresses") / double(1_GiB),
        whole("exchange_sockets"), whole("imported_handles"),
        fmt::format("{} ({})", whole("bootstrap_neighbours"), whole("neighbours_if_flat")),
        fmt::format("{} ({})", whole("growth_messages"), whole("growth_messages_if_flat")),
        number("growth_bytes") / 1024, 1e3 * number("growth_seconds"),
        1e3 * number("start_seconds"), number("channel_words") / 1024, whole("barrier_messages"));
  }
}

}  // namespace
}  // namespace evmm

int main(int argc, char** argv) {
  evmm::model how;
  CLI::App app("What a rank takes in jobs of 8 to 100,000 ranks, by the code's own functions");
  app.add_option("--ranks-a-node", how.ranks_a_node, "ranks that share a node")
      ->check(CLI::Range(1, 72));
  app.add_option("--segments", how.segments, "segments of the region")->check(CLI::Range(1, 64));
  app.add_option("--reserve", how.reserve_gib, "GiB of addresses for each rank")
      ->check(CLI::PositiveNumber);
  app.add_option("--latency", how.latency_us, "us of a message between nodes")
      ->check(CLI::PositiveNumber);
  app.add_option("--bandwidth", how.bandwidth_gb, "GB/s of a rank between nodes")
      ->check(CLI::PositiveNumber);
  app.add_flag("--json", how.json, "print JSON");
  CLI11_PARSE(app, argc, argv);
  try {
    const auto counted = evmm::count_steps();
    nlohmann::ordered_json rows = nlohmann::ordered_json::array();
    for (const int ranks : {8, 64, 256, 1'024, 4'096, 16'384, 65'536, 100'000}) {
      rows.push_back(evmm::row(ranks, how, counted));
    }
    if (how.json) {
      fmt::print("{}\n", rows.dump(2));
    } else {
      evmm::print(rows, how);
    }
  } catch (const std::exception& failure) {
    fmt::print(stderr, "{}\n", failure.what());
    return 1;
  }
  return 0;
}
