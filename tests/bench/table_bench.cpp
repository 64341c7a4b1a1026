// SPDX-License-Identifier: Apache-2.0
// Gathers from a sharded table in host memory: indices on the device to rows on the device, the
// ordering included. Run under mpirun, one rank a GPU; one rank will do. Rank 0 reports the slowest
// rank of each round.
#include "lib/support/environment.hpp"
#include "tests/bench/bench_support.hpp"
#include "tests/bench/job_support.hpp"
#include "tests/bench/table_kernels.hpp"

#include <evmm/ep/table.hpp>
#include <evmm/units.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

namespace evmm::bench {
namespace {

using namespace evmm::units;

constexpr int k_rounds = 20;
constexpr std::size_t k_most = std::size_t{4} << 20;  ///< indices
constexpr std::size_t k_out_bytes = 4_GiB;
constexpr std::size_t k_device_bytes = 4_GiB;  ///< a rank's rows in DEVICE memory
constexpr std::size_t k_sample = 4096;         ///< rows that are copied one by one

enum class way { table, plain, copies };

struct table_case {
  std::size_t row_bytes = 256;
  std::size_t batch = std::size_t{1} << 18;
  way by = way::table;
  ep::gather_options how = {};
  double zipf = 0;
  std::size_t cache_rows = 0;
  bool on_device = false;
  bool peers_only = false;
};

/// Bytes of all ranks' rows in host memory.
std::size_t host_bytes(const job& at) {
  const auto wanted = environment_integer("EVMM_BENCH_TABLE_GIB", 1, 1 << 16);
  const std::size_t bytes = static_cast<std::size_t>(wanted.value_or(16)) * 1_GiB;
  std::size_t free = 0;
  for (const numa_node node : at.on->numa_nodes()) {
    free = std::max(free, at.on->usage(memory_location::on(node)).free_bytes);
  }
  // Half of what is free, the same for all ranks.
  std::size_t fits = free / 2 / 1_GiB * 1_GiB;
  for (const std::size_t other : at.ranks->all_gather_value(fits, "bench: free host memory")) {
    fits = std::min(fits, other);
  }
  return std::max(1_GiB, wanted ? bytes : std::min(bytes, fits));
}

/// The heap of all cases, and the table of the last ones: host memory takes seconds to make.
class tables {
 public:
  explicit tables(const job& at)
      : at_(at),
        host_bytes_(host_bytes(at)),
        heap_(
            symmetric_region(at.ranks, at.on,
                             {.device = at.device,
                              .reserve = host_bytes_ / static_cast<std::size_t>(at.ranks->size()) +
                                         k_device_bytes + 8_GiB})),
        probe_(at.device, k_most, k_out_bytes) {}

  ep::table& get(const table_case& wanted) {
    const ep::table_options options{
        .rows = rows(wanted),
        .row_bytes = wanted.row_bytes,
        .tiers = wanted.on_device ? tier_policy::device_only : tier_policy::host_only,
        .cache_rows = wanted.cache_rows,
        .max_batch = k_most};
    if (!table_ || table_->options().rows != options.rows ||
        table_->options().row_bytes != options.row_bytes ||
        table_->options().tiers != options.tiers ||
        table_->options().cache_rows != options.cache_rows) {
      table_.reset();
      table_.emplace(heap_, options);
      probe_.fill(table_->view());
      at_.ranks->barrier("bench: rows");
      link_ = wanted.on_device ? 0 : link_rate();
    }
    return *table_;
  }
  table_probe& probe() { return probe_; }
  /// GB/s of consecutive rows, by the plain kernel, all ranks at once; 0 for rows on the device.
  double link() const { return link_; }

 private:
  std::size_t rows(const table_case& wanted) const {
    const auto ranks = static_cast<std::size_t>(at_.ranks->size());
    return (wanted.on_device ? ranks * k_device_bytes : host_bytes_) / wanted.row_bytes;
  }
  double link_rate() {
    const table_view& view = table_->view();
    const std::size_t count = std::min<std::size_t>(
        {k_most, 1_GiB / view.row_bytes, static_cast<std::size_t>(view.rows)});
    const auto indices = probe_.consecutive(count);
    std::vector<double> times;
    for (int round = 0; round < 5; ++round) {
      probe_.prepare(count * view.row_bytes);
      at_.ranks->barrier("bench: round");
      probe_.begin();
      probe_.plain(view, indices);
      times.push_back(at_.slowest(probe_.end()));
    }
    std::nth_element(times.begin(), times.begin() + 2, times.end());
    return static_cast<double>(count * view.row_bytes) / times[2] * 1e-9;
  }

  job at_;
  std::size_t host_bytes_;
  symmetric_heap heap_;
  table_probe probe_;
  std::optional<ep::table> table_;
  double link_ = 0;
};

/// Made by the first case, dropped by main while all ranks are there.
std::optional<tables>& held() {
  static std::optional<tables> all;
  return all;
}

void measure(benchmark::State& state, const job& at, const table_case& wanted) {
  if (wanted.peers_only && at.ranks->size() == 1) {
    state.SkipWithError("no peers: run it on two ranks or more");
    return;
  }
  if (!held()) held().emplace(at);
  ep::table& table = held()->get(wanted);
  table_probe& probe = held()->probe();
  const table_view& view = table.view();
  const auto me = static_cast<std::uint64_t>(at.ranks->rank().value);
  index_draw draw{.first = 0, .count = view.rows, .zipf = wanted.zipf};
  if (wanted.peers_only) {
    draw.first = (me + 1) * view.rows_per_rank;
    draw.count = view.rows - view.rows_per_rank;
  }
  const std::size_t bytes = wanted.batch * wanted.row_bytes;
  std::uint64_t seed = me << 16;
  std::span<const std::int64_t> indices;
  const auto round = [&] {
    indices = probe.draw(view, draw, wanted.batch, ++seed);
    probe.prepare(bytes);
    at.ranks->barrier("bench: round");
    probe.begin();
    switch (wanted.by) {
      case way::table:
        table.gather(indices, probe.out(), probe.stream(), wanted.how);
        break;
      case way::plain:
        probe.plain(view, indices);
        break;
      case way::copies:
        probe.copies(view, indices);
        break;
    }
    return at.slowest(probe.end());
  };
  const auto all_right = [&] {
    return at.slowest(static_cast<double>(probe.wrong(view, indices))) == 0;
  };
  round();  // the first touch, and a cache that has seen one batch
  if (!all_right()) {
    state.SkipWithError("what was gathered is wrong");
    return;
  }
  const auto before = table.statistics(probe.stream());
  std::vector<double> times;
  for (auto _ : state) {
    times.push_back(round());
    state.SetIterationTime(times.back());
  }
  const auto after = table.statistics(probe.stream());
  if (!all_right()) {
    state.SkipWithError("what was gathered is wrong");
    return;
  }
  const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
  std::nth_element(times.begin(), middle, times.end());
  const double rate = static_cast<double>(bytes) / *middle * 1e-9;
  state.counters["median_us"] = *middle * 1e6;
  state.counters["GBps"] = rate;
  state.counters["Mrows"] = static_cast<double>(wanted.batch) / *middle * 1e-6;
  if (held()->link() > 0) {
    state.counters["link_GBps"] = held()->link();
    state.counters["of_link"] = rate / held()->link();
  }
  if (const auto gathered = static_cast<double>(after.gathered - before.gathered); gathered > 0) {
    state.counters["ordered"] = table.orders(wanted.batch, wanted.how) ? 1 : 0;
    state.counters["fetched"] = static_cast<double>(after.fetched - before.fetched) / gathered;
    state.counters["hits"] = static_cast<double>(after.hits - before.hits) / gathered;
  }
}

void add_cases(const job& at) {
  const auto add = [&](const std::string& name, const table_case& wanted) {
    if (wanted.batch * wanted.row_bytes > k_out_bytes) return;
    add_case(fmt::format("table/{}/row:{}/batch:{}", name, wanted.row_bytes, wanted.batch),
             k_rounds, [=](benchmark::State& state) { measure(state, at, wanted); });
  };
  // Cases of one table follow each other.
  for (const std::size_t row : {256, 128, 512, 1024, 4096, 16384}) {
    for (std::size_t batch = 4096; batch <= k_most; batch *= 4) {
      add("gather", {.row_bytes = row, .batch = batch});
      add("peer_plain", {.row_bytes = row, .batch = batch, .by = way::plain});
    }
    add("peer_copies", {.row_bytes = row, .batch = k_sample, .by = way::copies});
    if (row != 256 && row != 1024) continue;
    for (std::size_t batch = 4096; batch <= k_most; batch *= 4) {
      add("as_given",
          {.row_bytes = row, .batch = batch, .how = {.order = ep::gather_order::as_given}});
      add("by_address",
          {.row_bytes = row, .batch = batch, .how = {.order = ep::gather_order::by_address}});
    }
    for (const std::size_t batch : {1 << 16, 1 << 18, 1 << 20}) {
      for (const int sms : {4, 8, 16, 32, 64, 132}) {
        add(fmt::format("sms_{}", sms),
            {.row_bytes = row,
             .batch = batch,
             .how = {.order = ep::gather_order::by_address, .sms = sms}});
      }
      for (const double zipf : {0.8, 0.99, 1.2}) {
        add(fmt::format("zipf_{}", zipf), {.row_bytes = row, .batch = batch, .zipf = zipf});
        add(fmt::format("peer_plain_zipf_{}", zipf),
            {.row_bytes = row, .batch = batch, .by = way::plain, .zipf = zipf});
      }
    }
  }
  for (const double zipf : {0.8, 0.99, 1.2}) {
    for (const std::size_t batch : {1 << 16, 1 << 18, 1 << 20}) {
      add(fmt::format("cached_zipf_{}", zipf),
          {.batch = batch, .zipf = zipf, .cache_rows = std::size_t{1} << 20});
    }
  }
  for (const std::size_t batch : {1 << 16, 1 << 18, 1 << 20}) {
    add("device", {.batch = batch, .on_device = true});
    add("peer_plain_device", {.batch = batch, .by = way::plain, .on_device = true});
    add("device_of_peers", {.batch = batch, .on_device = true, .peers_only = true});
    add("peer_plain_device_of_peers",
        {.batch = batch, .by = way::plain, .on_device = true, .peers_only = true});
  }
}

}  // namespace
}  // namespace evmm::bench

int main(int argc, char** argv) {
  const int code = evmm::bench::run_job(argc, argv, evmm::bench::add_cases);
  evmm::bench::held().reset();
  return code;
}
