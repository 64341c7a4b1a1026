// SPDX-License-Identifier: Apache-2.0
// What a heap tells about itself.
#include "comm/collective_change.hpp"
#include "comm/heap/symmetric_heap_state.hpp"
#include "lib/support/format.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace evmm {

heap_report symmetric_heap::report() {
  state& s = *state_;
  s.check_open();
  s.meet();
  const region_statistics held = s.region.statistics();
  memory_usage device;
  agree_on(s.region.ranks(), "symmetric_heap: report",
           [&] { device = s.region.on().usage(memory_location::on(s.region.device())); });
  heap_report all{
      .allocated_bytes = static_cast<std::size_t>(s.account.allocated_bytes(size_class::small) +
                                                  s.account.allocated_bytes(size_class::large)),
      .free_bytes = s.blocks.free_bytes(),
      .largest_free_block = s.blocks.free_in({}, {}).largest,
      .reserved_bytes = s.region.reserved(),
      .segments = s.blocks.segments().size(),
      .ranks = s.region.ranks().all_gather_value(
          rank_memory{.device_bytes = held.device_bytes,
                      .host_bytes = held.host_bytes,
                      .cached_bytes = held.cached_bytes,
                      .device_total_bytes = device.total_bytes,
                      .device_free_bytes = device.free_bytes,
                      .device_limit = std::min(s.options.device_limit, device.total_bytes)},
          "symmetric_heap: report")};
  s.blocks.for_live(0, s.blocks.size(), [&](const heap_block& block) {
    if (!s.is_pending(block.at)) all.requested_bytes += block.requested;
  });
  return all;
}

std::string heap_report::text() const {
  std::string text = fmt::format(
      "symmetric heap: {} allocated ({} asked for), {} free in blocks of at most {}, {} segments, "
      "{} of addresses\n",
      format_bytes(allocated_bytes), format_bytes(requested_bytes), format_bytes(free_bytes),
      format_bytes(largest_free_block), segments, format_bytes(reserved_bytes));
  text += fmt::format("{:>5} {:>12} {:>12} {:>12} {:>12} {:>12} {:>12}\n", "rank", "DEVICE",
                      "HOST_NUMA", "cached", "limit", "GPU free", "GPU total");
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const rank_memory& of = ranks[r];
    text += fmt::format("{:>5} {:>12} {:>12} {:>12} {:>12} {:>12} {:>12}\n", r,
                        format_bytes(of.device_bytes), format_bytes(of.host_bytes),
                        format_bytes(of.cached_bytes), format_bytes(of.device_limit),
                        format_bytes(of.device_free_bytes), format_bytes(of.device_total_bytes));
  }
  return text;
}

allocator_statistics symmetric_heap::statistics() const {
  const state& s = *state_;
  s.check_open();
  allocator_statistics all;
  s.books.fill(all);
  const region_statistics held = s.region.statistics();
  all.segment.all = all.segment.large_pool = s.segment_count;
  all.reserved_bytes.all = all.reserved_bytes.large_pool = s.reserved_bytes;
  all.num_alloc_retries = s.growths;
  all.num_ooms = s.ooms;
  all.num_device_alloc = static_cast<std::int64_t>(held.handles_created);
  all.num_device_free = static_cast<std::int64_t>(held.handles_released);
  all.mapped_bytes = static_cast<std::int64_t>(held.device_bytes + held.host_bytes);
  all.handles_recycled = static_cast<std::int64_t>(held.handles_reused);
  all.host_tier_bytes = static_cast<std::int64_t>(held.host_bytes);
  return all;
}

void symmetric_heap::reset_peaks() {
  state_->books.reset_peaks();
  for (statistic* one : {&state_->segment_count, &state_->reserved_bytes}) one->peak = one->current;
}

void symmetric_heap::reset_totals() {
  state_->books.reset_totals();
  for (statistic* one : {&state_->segment_count, &state_->reserved_bytes}) {
    one->allocated = one->freed = 0;
  }
  state_->growths = state_->ooms = 0;
}

void symmetric_heap::record_history(const history_options& options) {
  state_->happened.configure(options);
}

void symmetric_heap::annotate(std::vector<std::pair<std::string, std::string>> values) {
  state_->happened.annotate(std::move(values));
}

caching_allocator::subscription symmetric_heap::on_trace(
    std::function<void(const trace_entry&)> observer) {
  return state_->happened.listen(std::move(observer));
}

allocator_snapshot symmetric_heap::snapshot(bool traces) const {
  const state& s = *state_;
  s.check_open();
  const auto base = reinterpret_cast<address>(s.region.local());
  const auto device = static_cast<std::size_t>(s.region.device().value);
  allocator_snapshot all;
  const std::vector<segment> held = s.region.segments(s.region.rank());
  for (std::size_t i = 0; i < held.size(); ++i) {
    const heap_segment& of = s.blocks.segments()[i];
    segment_snapshot made{.device = s.region.device().value,
                          .at = base + of.offset,
                          .total_bytes = of.bytes,
                          .large = true,
                          .pool = number_of(of.pool),
                          .expandable = true,
                          .where = held[i].where.kind,
                          .blocks = {}};
    // Blocks that span segments are shown in each, cut at its ends.
    for (const auto& [offset, block] : s.blocks.all()) {
      const std::size_t from = std::max(offset, of.offset);
      const std::size_t to = std::min(offset + block.bytes, of.end());
      if (from >= to) continue;
      made.blocks.push_back({.at = base + from, .bytes = to - from});
      if (!block.live()) continue;
      const bool pending = s.is_pending(offset);
      made.blocks.back().state =
          pending ? block_state::active_pending_free : block_state::active_allocated;
      if (block.stack) made.blocks.back().frames = block.stack->resolve();
      const std::size_t wanted = std::min(offset + block.requested, to);
      made.blocks.back().requested_bytes = wanted - std::min(wanted, from);
      if (!pending) made.allocated_bytes += to - from;
      made.active_bytes += to - from;
      made.requested_bytes += made.blocks.back().requested_bytes;
    }
    all.segments.push_back(std::move(made));
  }
  all.device_traces.resize(device + 1);
  if (traces) {
    all.device_traces[device] = s.happened.entries();
    all.external_annotations = s.happened.annotations();
  }
  all.settings = {{"rank", std::to_string(s.region.rank().value)},
                  {"ranks", std::to_string(s.region.rank_count())},
                  {"backing", "symmetric_heap"}};
  return all;
}

void symmetric_heap::check_invariants() const {
  const state& s = *state_;
  s.blocks.check();
  if (s.closed) return;
  if (s.blocks.size() != s.region.size()) {
    throw std::logic_error(fmt::format("the heap knows {} bytes, its region has {}",
                                       s.blocks.size(), s.region.size()));
  }
}

}  // namespace evmm
