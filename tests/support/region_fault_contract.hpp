// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/region_contract.hpp"

#include <cstdio>

// Every change under a driver that fails at every single call in turn.

namespace evmm::test {

/// A change to try, on a region of four segments (DEVICE, HOST, DEVICE, discarded DEVICE).
struct change_case {
  std::string name;
  std::function<void(elastic_region&)> act;
};

inline std::vector<change_case> region_changes(std::size_t granule) {
  return {
      {"grow device", [=](auto& region) { region.grow(tier::device, granule); }},
      {"grow host", [=](auto& region) { region.grow(tier::host, 2 * granule); }},
      {"shrink", [=](auto& region) { region.shrink(2 * granule); }},
      {"shrink later",
       [=](auto& region) {
         region.shrink_later(2 * granule);
         region.finish();
       }},
      {"migrate to host", [](auto& region) { region.migrate(0, tier::host); }},
      {"migrate to device", [](auto& region) { region.migrate(1, tier::device); }},
      {"migrate later",
       [](auto& region) {
         region.migrate_later(0, tier::host);
         region.finish();
       }},
      {"discard, drop", [](auto& region) { region.discard(contents::drop); }},
      {"discard, backup", [](auto& region) { region.discard(contents::backup); }},
      {"restore", [](auto& region) { region.restore(); }},
  };
}

class region_fault_contract : public region_contract {
 protected:
  struct setup {
    std::shared_ptr<fault_driver> faulty;
    std::unique_ptr<elastic_region> region;
  };

  setup prepare() {
    setup made;
    made.faulty = fault_driver::make(on);
    made.region = std::make_unique<elastic_region>(
        made.faulty, region_options{.reserve = 64 * granule, .cache_limit = 0});
    auto& region = *made.region;
    region.grow(tier::device, granule);
    region.grow(tier::host, granule);
    region.grow(tier::device, granule);
    region.grow(tier::device, granule);
    region.migrate(2, tier::host);  // the region's own stream exists from here on
    region.migrate(2, tier::device);
    write_pattern(*on, at(region), 4 * granule, 21);
    region.discard(contents::backup, {}, 3, 1);
    return made;
  }

  static std::string layout(const elastic_region& region) {
    std::string text = std::to_string(region.size());
    for (const segment& held : region.segments()) {
      text += " " + std::to_string(held.offset) + "+" + std::to_string(held.bytes) + "@" +
              to_string(held.where) + (held.state == segment_state::mapped ? "" : "!");
    }
    return text;
  }
};

TEST_P(region_fault_contract, a_failed_change_leaves_no_trace) {
  // Whatever may fail routinely, then the calls that should not fail but might.
  struct failing {
    std::string name;
    std::function<void(fault_driver&, std::size_t)> arm;
  };
  std::vector<failing> ways = {
      {"any call", [](fault_driver& faulty, std::size_t nth) { faulty.fail_call(nth); }}};
  for (const driver_call kind : {driver_call::synchronize_stream, driver_call::synchronize_event,
                                 driver_call::done, driver_call::unmap}) {
    ways.push_back({to_string(kind), [kind](fault_driver& faulty, std::size_t nth) {
                      faulty.fail_call(kind, nth);
                    }});
  }
  std::size_t points = 0;
  for (const change_case& tried : region_changes(granule)) {
    for (const failing& way : ways) {
      for (std::size_t nth = 0;; ++nth) {
        auto [faulty, region] = prepare();
        const auto alive = faulty->alive();
        const auto before = layout(*region);
        const auto epoch = region->epoch();
        way.arm(*faulty, nth);
        bool threw = false;
        try {
          tried.act(*region);
        } catch (const error&) {
          threw = true;
        }
        SCOPED_TRACE(tried.name + ", " + way.name + " " + std::to_string(nth));
        if (!faulty->disarm()) {
          EXPECT_FALSE(threw) << "without a failure it succeeds";
          break;
        }
        ++points;
        if (!threw) continue;  // cured by a second attempt, or in a clean-up that only logs
        if (region->poll() > 0 || layout(*region) != before) {
          // A deferred change that was accepted stays pending, and can be completed.
          EXPECT_NE(tried.name.find("later"), std::string::npos) << layout(*region);
          region->finish();
          continue;
        }
        EXPECT_EQ(to_string(faulty->alive()), to_string(alive));
        EXPECT_EQ(region->epoch(), epoch);
        EXPECT_TRUE(holds_pattern(*on, at(*region), 3 * granule, 21));
        tried.act(*region);  // and it can be done after all
        if (region->statistics().discarded_bytes > 0) region->restore();
        EXPECT_TRUE(tried.name == "discard, drop" || holds_pattern(*on, at(*region), granule, 21));
      }
    }
  }
  RecordProperty("failing_points", static_cast<int>(points));
  std::printf("%zu failing points tried\n", points);
  EXPECT_GT(points, 70u);
}

TEST_P(region_fault_contract, destruction_leaves_nothing_alive) {
  const auto faulty = fault_driver::make(on);
  const auto live_and_die = [&] {
    elastic_region region(faulty, {.reserve = 64 * granule});
    region.grow(tier::device, granule);
    region.grow(tier::host, granule);
    region.migrate_later(0, tier::host);
    region.shrink_later(granule);
  };
  live_and_die();  // CUDA opens descriptors of its own at the first use of this and that
  const auto alive = faulty->alive();
  live_and_die();
  EXPECT_EQ(to_string(faulty->alive()), to_string(alive));
}

}  // namespace evmm::test
