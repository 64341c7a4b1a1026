// SPDX-License-Identifier: Apache-2.0
// What `evmm replay` counts and how it reports; replay_program_test runs it.
#include "lib/cli/counting_driver.hpp"
#include "lib/cli/replay.hpp"

#include <evmm/error.hpp>
#include <evmm/host_driver.hpp>
#include <evmm/units.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <string>

namespace evmm::cli {
namespace {

using namespace evmm::units;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

TEST(cli_counting_driver, counts_calls_that_do_something_however_they_end) {
  counting_driver on(host_driver::make({.devices = 1, .device_bytes = 4_MiB}));
  const auto where = memory_location::on(device_id{0});
  EXPECT_EQ(on.info().kind, driver_kind::host);
  EXPECT_EQ(on.device_count(), 1);
  EXPECT_TRUE(on.can_access({0}, {0}));
  EXPECT_EQ(on.capture(nullptr).status, capture_status::none);
  const std::size_t granule = on.granularity(where);
  EXPECT_EQ(on.calls(), 0u);
  EXPECT_EQ(on.time_in_calls().count(), 0);

  const address base = on.reserve(granule, 0, 0);
  const auto handle = on.create({.bytes = granule, .where = where});
  on.map(base, granule, handle);
  on.set_access(base, granule, std::vector<access_grant>{{.who = where}});
  EXPECT_EQ(on.calls(), 4u);
  EXPECT_GT(on.time_in_calls().count(), 0);
  EXPECT_THROW(static_cast<void>(on.create({.bytes = 8_MiB, .where = where})), out_of_memory);
  EXPECT_EQ(on.calls(), 5u);

  const native_stream stream = on.create_stream({0});
  const native_event event = on.create_event({0});
  on.fill(base, std::byte{7}, granule, stream);
  on.record(event, stream);
  on.wait(stream, event);
  on.synchronize(event);
  EXPECT_TRUE(on.done(event));
  std::byte first{};
  on.copy(reinterpret_cast<address>(&first), base, 1, stream);
  on.launch(stream, [] {});
  on.synchronize(stream);
  EXPECT_TRUE(on.idle(stream));
  EXPECT_EQ(first, std::byte{7});
  on.destroy_event(event);
  on.destroy_stream(stream);
  EXPECT_EQ(on.calls(), 18u);
  on.unmap(base, granule);
  on.release(handle);
  on.free(base, granule);
  EXPECT_EQ(on.usage(where).free_bytes, 4_MiB);
  EXPECT_EQ(on.calls(), 22u);
}

replay_report made_up() {
  replay_report report;
  report.passes = {{.trace = "/far/a.csv.gz",
                    .pass = 0,
                    .events = 1000,
                    .ns_per_event = 61.25,
                    .peak_allocated_bytes = 1 << 30,
                    .peak_reserved_bytes = (1 << 30) + (1 << 28),
                    .driver_calls = 40,
                    .time_in_driver_calls_ns = 2'500'000,
                    .segments = 12,
                    .created_handles = 12,
                    .recycled_handles = 3,
                    .claimed_handles = 2},
                   {.trace = "/far/a.csv.gz", .pass = 1, .events = 1000},
                   {.trace = "b.csv", .pass = 0, .events = 5}};
  report.curves = {{.trace = "/far/<a>&b.csv",
                    .events = 5,
                    .events_a_point = 2,
                    .points = {{1 << 20, 1 << 20, 2 << 20}, {3 << 20, 3 << 20, 4 << 20}, {}}},
                   {.trace = "empty.csv"}};
  return report;
}

TEST(cli_replay, json_has_one_object_a_pass_with_these_keys) {
  const auto json = to_json(made_up());
  ASSERT_EQ(json.size(), 3u);
  std::string keys;
  for (const auto& [key, value] : json[0].items()) keys += key + " ";
  EXPECT_EQ(keys,
            "trace pass events ns_per_event peak_allocated_bytes peak_reserved_bytes "
            "reserved_over_allocated driver_calls time_in_driver_calls_ns segments "
            "created_handles recycled_handles claimed_handles ");
  EXPECT_EQ(json[0]["trace"], "/far/a.csv.gz");
  EXPECT_EQ(json[0]["reserved_over_allocated"], 1.25);
  EXPECT_EQ(json[0]["claimed_handles"], 2);
  EXPECT_EQ(json[1]["pass"], 1);
  EXPECT_EQ(json[1]["reserved_over_allocated"], 0);
}

TEST(cli_replay, text_has_a_table_a_trace) {
  EXPECT_THAT(
      to_text(made_up()),
      AllOf(HasSubstr("a.csv.gz: 1000 events\n"), HasSubstr("1.2500"), HasSubstr("1.2 GiB"),
            HasSubstr("2.50 ms"), HasSubstr("\n\nb.csv: 5 events\n"), Not(HasSubstr("/far/"))));
}

TEST(cli_replay, picture_has_a_panel_a_trace) {
  const std::string picture = draw(made_up().curves);
  EXPECT_THAT(picture, AllOf(testing::StartsWith("<svg "), testing::EndsWith("</svg>\n"),
                             HasSubstr("&lt;a>&amp;b.csv: 5 events, peak reserved / peak "
                                       "allocated 1.3333"),
                             HasSubstr("peak 4.0 MiB"), HasSubstr("empty.csv: 0 events<"),
                             Not(HasSubstr("nan")), Not(HasSubstr("inf"))));
}

}  // namespace
}  // namespace evmm::cli
