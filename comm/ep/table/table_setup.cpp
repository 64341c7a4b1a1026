// SPDX-License-Identifier: Apache-2.0
// How a table comes to be and goes.
#include "comm/collective_change.hpp"
#include "comm/ep/heap_source.hpp"
#include "comm/ep/table/hot_rows.hpp"
#include "comm/ep/table/table_state.hpp"
#include "lib/memory/device_scope.hpp"
#include "lib/support/log.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace evmm::ep {

namespace {

/// Options that every rank must give alike.
struct shared_table_options {
  std::size_t rows, row_bytes, device_rows, cache_rows, max_batch;
  tier_policy tiers;
  friend bool operator==(const shared_table_options&, const shared_table_options&) = default;
};

std::size_t shard_rows(std::size_t rows, int ranks) {
  const auto count = static_cast<std::size_t>(ranks);
  return rows / count + (rows % count != 0 ? 1 : 0);
}

void check_options(const table_options& given, int ranks) {
  if (given.rows == 0) refuse("rows is 0", "give the rows of all ranks together");
  const auto padded = static_cast<std::size_t>(ranks) * shard_rows(given.rows, ranks);
  if (given.rows >= k_no_row || padded >= k_no_row) {
    refuse(fmt::format("rows is {}, {} when rounded up to {} ranks", given.rows, padded, ranks),
           fmt::format("at most {}: make several tables, or larger rows", k_no_row - 1));
  }
  if (given.row_bytes < 128 || given.row_bytes > 16384 || given.row_bytes % 16 != 0) {
    refuse(fmt::format("row_bytes is {}", given.row_bytes),
           "give a multiple of 16 from 128 to 16,384");
  }
  if (given.device_rows > 0 && given.tiers != tier_policy::device_first) {
    refuse(fmt::format("device_rows is {} with {}", given.device_rows, to_string(given.tiers)),
           "give tier_policy::device_first with it");
  }
  if (given.cache_rows > (std::size_t{1} << 30)) {
    refuse(fmt::format("cache_rows is {}", given.cache_rows), "give at most 1,073,741,824");
  }
  if (given.max_batch == 0 || given.max_batch > (std::size_t{1} << 30)) {
    refuse(fmt::format("max_batch is {}", given.max_batch), "give 1 to 1,073,741,824");
  }
}

}  // namespace

table::state::state(symmetric_heap& given, const table_options& wanted)
    : heap(given), options(wanted) {
  symmetric_region& region = heap.region();
  bootstrap& ranks = region.ranks();
  const int count = ranks.size();
  agree_on(ranks, "ep::table: options", [&] {
    check_options(options, count);
    if (ranks.node_count() > 1) {
      throw unsupported(fmt::format("ep::table: the ranks are on {} nodes", ranks.node_count()),
                        "make one table for the ranks of each node");
    }
  });
  const shared_table_options mine{options.rows,       options.row_bytes, options.device_rows,
                                  options.cache_rows, options.max_batch, options.tiers};
  const auto all = ranks.all_gather_value(mine, "ep::table: options of all");
  for (std::size_t r = 1; r < all.size(); ++r) {
    if (all[r] == all[0]) continue;
    refuse(fmt::format("rank 0 and rank {} gave different options (rows {} and {}, row_bytes {} "
                       "and {}, device_rows {} and {}, cache_rows {} and {}, max_batch {} and {}, "
                       "tiers {} and {})",
                       r, all[0].rows, all[r].rows, all[0].row_bytes, all[r].row_bytes,
                       all[0].device_rows, all[r].device_rows, all[0].cache_rows, all[r].cache_rows,
                       all[0].max_batch, all[r].max_batch, to_string(all[0].tiers),
                       to_string(all[r].tiers)),
           "give every rank the same");
  }
  // A device may need more scratch than another: blocks of a heap are as large everywhere.
  std::size_t scratch_bytes = 0;
  agree_on(ranks, "ep::table: begin", [&] {
    const device_scope scope(on(), device());
    steps = on().info().kind == driver_kind::cuda
                ? make_cuda_table_steps(device(), static_cast<std::uint32_t>(options.max_batch))
                : make_host_table_steps(on());
    scratch_bytes = steps->scratch_bytes();
  });
  for (const std::size_t bytes : ranks.all_gather_value(scratch_bytes, "ep::table: scratch")) {
    scratch_bytes = std::max(scratch_bytes, bytes);
  }

  take_with_segments(heap, options.device_rows > 0 ? 2 : 0, [&] { rows = make_rows(); });
  const symmetric_request on_device{.tiers = tier_policy::device_only};
  counts = {heap, 1, nullptr, on_device};
  if (scratch_bytes > 0) scratch = {heap, scratch_bytes, nullptr, on_device};
  if (options.cache_rows > 0) {
    shape.sets = static_cast<std::uint32_t>((options.cache_rows + k_ways - 1) / k_ways);
    const std::size_t slots = std::size_t{shape.sets} * k_ways;
    tags = {heap, slots, nullptr, on_device};
    copies = {heap, slots * options.row_bytes, nullptr, on_device};
    shape.tags = tags.offset();
    shape.copies = copies.offset();
  }
  const symmetric_view view = region.view();
  shape.view = {.first = view.base + rows.offset(),
                .stride = view.stride,
                .rows = options.rows,
                .rows_per_rank = shard_rows(options.rows, count),
                .row_bytes = static_cast<std::uint32_t>(options.row_bytes),
                .rank = view.rank,
                .ranks = view.ranks};
  shape.base = view.base;
  shape.stride = view.stride;
  shape.counts = counts.local();

  agree_on(ranks, "ep::table: end", [&] {
    const device_scope scope(on(), device());
    multiprocessors = on().describe(device()).multiprocessors;
    own.emplace(on(), device());
    events = std::make_shared<event_store>(on(), device());
    for (auto* const event : {&eager.event, &captured.event, &write, &issued_after}) {
      event->emplace(on(), device());
    }
    // The blocks may have been another stream's, for which the default stream waits.
    on().record(issued_after->get(), nullptr);
    on().wait(own->get(), issued_after->get());
    on().fill(address_of(counts.local()), std::byte{0}, counts.bytes(), own->get());
    if (tags) on().fill(address_of(tags.local()), std::byte{0}, tags.bytes(), own->get());
    on().synchronize(own->get());
  });
}

table::state::~state() {
  // What is on other streams; the table's own waits for itself.
  log_failure("waiting for a table's gathers and writes", [&] {
    if (eager.recorded) on().synchronize(eager.event->get());
    if (written) on().synchronize(write->get());
  });
}

symmetric_buffer<std::byte> table::state::make_rows() {
  const std::size_t count = shard_rows(options.rows, heap.region().rank_count());
  const std::size_t bytes = count * options.row_bytes;
  constexpr std::size_t page = 4096;
  if (options.device_rows == 0) {
    const bool two =
        options.tiers == tier_policy::device_first || options.tiers == tier_policy::host_first;
    return {heap, bytes, nullptr, {.tiers = options.tiers, .may_span = two, .alignment = page}};
  }
  // Segments of its own, so that the border between the tiers lies where it was asked for.
  const std::size_t granule = heap.region().granularity();
  const std::size_t device = std::min(options.device_rows, count) * options.row_bytes;
  const std::size_t on_device = (device + granule - 1) / granule * granule;
  pool.emplace(heap);
  heap.grow(tier::device, on_device, pool->id());
  if (bytes > on_device) heap.grow(tier::host, bytes - on_device, pool->id());
  return {heap, bytes, nullptr, {.may_span = true, .alignment = page, .pool = pool->id()}};
}

}  // namespace evmm::ep
