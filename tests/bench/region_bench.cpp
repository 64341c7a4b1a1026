// SPDX-License-Identifier: Apache-2.0
// What the elastic region adds to the driver calls it makes, what its handle cache saves, and what
// programs without it pay for the same change.
#include "tests/bench/bench_support.hpp"
#include "tests/bench/cuda_peers.hpp"

#include <evmm/address_range.hpp>
#include <evmm/elastic_region.hpp>
#include <evmm/mapping.hpp>
#include <evmm/physical_memory.hpp>
#include <evmm/units.hpp>

#include <string>
#include <vector>

namespace evmm::bench {
namespace {

using namespace evmm::units;

constexpr std::size_t k_all = static_cast<std::size_t>(-1);

memory_location place(const machine& here, tier kind) {
  return kind == tier::device ? here.device_memory() : here.host_memory();
}

elastic_region make_region(const machine& here, std::size_t reserve, std::size_t cache_limit,
                           std::size_t max_segment = region_options{}.max_segment_bytes) {
  return {here.on,
          {.device = here.device.id,
           .reserve = reserve,
           .max_segment_bytes = max_segment,
           .cache_limit = cache_limit}};
}

/// Times `change`, and undoes it outside the time.
template <class Change, class Undo>
void repeat(benchmark::State& state, const machine& here, std::size_t bytes, Change&& change,
            Undo&& undo) {
  for (auto _ : state) {
    settle(here, bytes);
    state.SetIterationTime(seconds(change));
    undo();
  }
  count_bytes(state, bytes);
}

// --- grow and shrink --------------------------------------------------------------------------

/// The floor for a growth: one handle through the bare driver, into addresses reserved already.
class growth_by_hand {
 public:
  growth_by_hand(const machine& here, tier kind, std::size_t bytes)
      : on_(*here.on),
        bytes_(bytes),
        where_(place(here, kind)),
        grants_(here.access(where_)),
        range_(on_, bytes) {}

  void grow() {
    handle_ = on_.create({.bytes = bytes_, .where = where_});
    on_.map(range_.base(), bytes_, handle_);
    on_.set_access(range_.base(), bytes_, grants_);
  }
  void undo() {
    on_.unmap(range_.base(), bytes_);
    on_.release(handle_);
  }

 private:
  driver& on_;
  std::size_t bytes_;
  memory_location where_;
  std::vector<access_grant> grants_;
  address_range range_;
  allocation_handle handle_{};
};

// Region and floor alternate within the case: what a GPU charges for a handle drifts by a factor of
// two from one second to the next.
void grow_region(benchmark::State& state, const machine& here, tier kind, std::size_t bytes,
                 std::size_t max_segment = region_options{}.max_segment_bytes) {
  here.need(place(here, kind), bytes);
  auto region = make_region(here, bytes, 0, max_segment);
  growth_by_hand floor(here, kind, bytes);
  // Once before: the first use of the host tier chooses its node.
  region.grow(kind, bytes);
  region.shrink(bytes);
  double by_region = 0;
  double by_hand = 0;
  for (auto _ : state) {
    settle(here, bytes);
    by_hand += seconds([&] { floor.grow(); });
    floor.undo();
    settle(here, bytes);
    const double time = seconds([&] { region.grow(kind, bytes); });
    state.SetIterationTime(time);
    by_region += time;
    region.shrink(bytes);
  }
  count_bytes(state, bytes);
  state.counters["by_hand_ms"] = by_hand * 1e3 / static_cast<double>(state.iterations());
  state.counters["over_hand"] = by_region / by_hand;
}

/// The handle comes from the region's cache instead of from the driver.
void grow_from_cache(benchmark::State& state, const machine& here, tier kind, std::size_t bytes) {
  here.need(place(here, kind), bytes);
  auto region = make_region(here, bytes, bytes);
  region.grow(kind, bytes);
  region.shrink(bytes);
  settle(here, bytes);
  repeat(
      state, here, bytes, [&] { region.grow(kind, bytes); }, [&] { region.shrink(bytes); });
}

// A region that fills its reservation by small requests takes larger steps as its slots run out.
void fill_in_steps(benchmark::State& state, const machine& here, std::size_t bytes) {
  here.need(here.device_memory(), bytes);
  auto region = make_region(here, bytes, 0);
  std::size_t segments = 0;
  repeat(
      state, here, bytes,
      [&] {
        while (region.size() < bytes) region.grow(tier::device, 2_MiB);
      },
      [&] {
        segments = region.segments().size();
        region.shrink(k_all);
      });
  state.counters["segments"] = static_cast<double>(segments);
}

void shrink_region(benchmark::State& state, const machine& here, tier kind, std::size_t bytes,
                   bool cached) {
  here.need(place(here, kind), bytes);
  auto region = make_region(here, bytes, cached ? bytes : 0);
  region.grow(kind, bytes);
  repeat(
      state, here, bytes, [&] { region.shrink(bytes); }, [&] { region.grow(kind, bytes); });
}

// A region that holds `bytes` grows by `more`.
void extend(benchmark::State& state, const machine& here, std::size_t bytes, std::size_t more) {
  here.need(here.device_memory(), bytes + more);
  auto region = make_region(here, bytes + more, 0);
  region.grow(tier::device, bytes);
  repeat(
      state, here, more, [&] { region.grow(tier::device, more); }, [&] { region.shrink(more); });
}

// --- moving and sleeping ----------------------------------------------------------------------

void migrate(benchmark::State& state, const machine& here, tier to, std::size_t bytes,
             bool cached) {
  const tier from = to == tier::host ? tier::device : tier::host;
  here.need(here.device_memory(), bytes);
  here.need(here.host_memory(), bytes);
  auto region = make_region(here, bytes, cached ? 2 * bytes : 0);
  region.grow(from, bytes);
  region.migrate(0, to);  // as in grow_region
  region.migrate(0, from);
  repeat(
      state, here, bytes, [&] { region.migrate(0, to); }, [&] { region.migrate(0, from); });
}

void sleep(benchmark::State& state, const machine& here, contents kept, std::size_t bytes,
           bool waking) {
  here.need(here.device_memory(), bytes);
  if (kept == contents::backup) here.need(here.host_memory(), bytes);
  auto region = make_region(here, bytes, 2 * bytes);
  region.grow(tier::device, bytes);
  const auto discard = [&] { region.discard(kept); };
  const auto restore = [&] { region.restore(); };
  discard();
  if (waking) {
    repeat(state, here, bytes, restore, discard);
  } else {
    restore();
    repeat(state, here, bytes, discard, restore);
  }
}

// --- the cases --------------------------------------------------------------------------------

void add_growth(const machine& here) {
  const auto add_tier = [&here](tier kind, const std::string& name,
                                std::initializer_list<std::size_t> sizes) {
    add("grow/" + name + "/region", sizes,
        [&here, kind](auto& state, std::size_t bytes) { grow_region(state, here, kind, bytes); });
    add("grow/" + name + "/region_cached", sizes, [&here, kind](auto& state, std::size_t bytes) {
      grow_from_cache(state, here, kind, bytes);
    });
    add("shrink/" + name + "/released", sizes, [&here, kind](auto& state, std::size_t bytes) {
      shrink_region(state, here, kind, bytes, false);
    });
    add("shrink/" + name + "/cached", sizes, [&here, kind](auto& state, std::size_t bytes) {
      shrink_region(state, here, kind, bytes, true);
    });
  };
  add_tier(tier::device, "DEVICE", {1_GiB, 16_GiB, 64_GiB});
  add_tier(tier::host, "HOST_NUMA", {1_GiB, 4_GiB});
  add("grow/DEVICE/region_one_segment", {16_GiB, 64_GiB}, [&here](auto& state, std::size_t bytes) {
    grow_region(state, here, tier::device, bytes, bytes);
  });
  add("fill/DEVICE/region_in_steps", {1_GiB, 16_GiB, 64_GiB},
      [&here](auto& state, std::size_t bytes) { fill_in_steps(state, here, bytes); });
  add("extend_by_1_GiB/DEVICE/region", {1_GiB, 16_GiB, 64_GiB},
      [&here](auto& state, std::size_t bytes) { extend(state, here, bytes, 1_GiB); });
}

void add_moves(const machine& here) {
  // The host driver copies with the CPU into pages that it has to touch first.
  const std::size_t size = here.cuda ? 1_GiB : 16_MiB;
  for (const tier to : {tier::host, tier::device}) {
    for (const bool cached : {false, true}) {
      add("migrate/to_" + to_string(to) + (cached ? "/cached" : "/created"), {size},
          [&here, to, cached](auto& state, std::size_t bytes) {
            migrate(state, here, to, bytes, cached);
          });
    }
  }
  for (const bool waking : {false, true}) {
    for (const contents kept : {contents::drop, contents::backup}) {
      add(std::string(waking ? "restore" : "discard") +
              (kept == contents::drop ? "/dropped" : "/backup"),
          {size}, [&here, kept, waking](auto& state, std::size_t bytes) {
            sleep(state, here, kept, bytes, waking);
          });
    }
  }
}

void add_all(const machine& here) {
  add_growth(here);
  add_moves(here);
#if EVMM_BENCH_CUDA
  if (here.cuda) add_cuda_peers(here);
#endif
}

}  // namespace
}  // namespace evmm::bench

int main(int argc, char** argv) {
  return evmm::bench::run(argc, argv, evmm::bench::add_all);
}
