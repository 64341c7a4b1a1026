// SPDX-License-Identifier: Apache-2.0
#include "comm/symmetric_state.hpp"
#include "lib/memory/region_rules.hpp"
#include "lib/memory/segment_plan.hpp"
#include "lib/support/format.hpp"
#include "lib/support/log.hpp"

#include <evmm/comm/symmetric_region.hpp>
#include <evmm/error.hpp>

#include <fmt/format.h>

#include <utility>

namespace evmm {

symmetric_region::symmetric_region(std::shared_ptr<bootstrap> ranks, std::shared_ptr<driver> on,
                                   const symmetric_options& options)
    : state_(std::make_unique<state>(std::move(ranks), std::move(on), options)) {}
symmetric_region::symmetric_region(symmetric_region&&) noexcept = default;
symmetric_region& symmetric_region::operator=(symmetric_region&&) noexcept = default;
symmetric_region::~symmetric_region() = default;

void symmetric_region::close(const uses& in_use) {
  state_->close(in_use);
}

rank_id symmetric_region::rank() const noexcept {
  return state_->ranks->rank();
}
int symmetric_region::rank_count() const noexcept {
  return state_->ranks->size();
}
device_id symmetric_region::device() const noexcept {
  return state_->device;
}
std::byte* symmetric_region::local() const {
  return peer(rank());
}
std::byte* symmetric_region::peer(rank_id rank) const {
  return reinterpret_cast<std::byte*>(state_->part_of(rank).base());
}
bool symmetric_region::reachable(rank_id rank) const {
  return state_->node_rank_of(rank).has_value();
}
std::size_t symmetric_region::size() const noexcept {
  return state_->closed ? 0 : state_->own().size();
}
std::size_t symmetric_region::reserved() const noexcept {
  return state_->limits.reserved;
}
std::size_t symmetric_region::max_segments() const noexcept {
  return state_->limits.max_segments;
}
std::size_t symmetric_region::granularity() const noexcept {
  return state_->limits.granularity;
}
std::uint64_t symmetric_region::epoch() const noexcept {
  return state_->epoch;
}
std::size_t symmetric_region::planned_growth(std::size_t bytes) const {
  state_->check_open();
  return next_segment_bytes(state_->limits, size(), state_->own().count(), bytes);
}
std::vector<segment> symmetric_region::segments(rank_id rank) const {
  return state_->part_of(rank).describe();
}
bool symmetric_region::same_address() const noexcept {
  return state_->same_address;
}
region_statistics symmetric_region::statistics() const {
  state_->check_open();
  return describe_statistics(state_->counts, state_->own(), *state_->source, *state_->copies);
}
std::optional<placement_choice> symmetric_region::placement() const {
  state_->check_open();
  return state_->source->placement();
}
bootstrap& symmetric_region::ranks() const noexcept {
  return *state_->ranks;
}
driver& symmetric_region::on() const noexcept {
  return *state_->on;
}

symmetric_view symmetric_region::view() const {
  state_->check_open();
  symmetric_view view;
  view.base = reinterpret_cast<char*>(state_->parts.front().base());
  view.stride = state_->limits.reserved;
  view.size = size();
  view.epoch = epoch();
  view.rank = state_->ranks->node_rank();
  view.ranks = static_cast<int>(state_->parts.size());
  view.segments = static_cast<int>(state_->own().count());
  for (std::size_t s = 0; s < state_->own().count(); ++s) {
    const slot& place = state_->own().at(s).place;
    view.segment_end[s] = place.at - state_->own().base() + place.bytes;
    for (std::size_t r = 0; r < state_->parts.size(); ++r) {
      const bool host = state_->parts[r].at(s).where.kind == tier::host;
      view.host_mask[r] |= std::uint64_t{host} << s;
    }
  }
  return view;
}

grown symmetric_region::grow(tier kind, std::size_t bytes, const uses& in_use) {
  return state_->grow(kind, bytes, in_use);
}
std::size_t symmetric_region::shrink(std::size_t bytes, const uses& in_use) {
  return state_->shrink(bytes, in_use);
}
void symmetric_region::migrate(std::size_t index, tier kind, const uses& in_use) {
  state_->migrate(index, kind, in_use);
}
void symmetric_region::discard(contents kept, const uses& in_use, std::size_t first,
                               std::size_t count) {
  state_->discard(kept, in_use, first, count);
}
void symmetric_region::restore() {
  state_->restore();
}
std::size_t symmetric_region::compact(const uses& in_use, std::size_t first, std::size_t count) {
  return state_->compact(in_use, first, count);
}

observer_subscription symmetric_region::observe(region_observer observer) {
  return state_->observers.add(std::move(observer));
}
observer_subscription symmetric_region::follow(collective_observer observer) {
  state_->check_open();
  return state_->followers.add(std::move(observer));
}
bool symmetric_region::takes_down(const region_change& change) const {
  state_->check_open();
  return state_->followers.concerned(change);
}
change_times symmetric_region::last_change() const noexcept {
  return state_->times;
}
std::size_t symmetric_region::trim_cache() {
  state_->check_open();
  return state_->source->trim();
}

}  // namespace evmm
