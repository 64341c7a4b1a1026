// SPDX-License-Identifier: Apache-2.0
// How an exchange comes to be: its workspace, its region, and what the report says of its ranks.
#include "exchange.hpp"
#include "report.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <span>
#include <utility>

namespace moe {

namespace {

evmm::device_id pick_device(const evmm::bootstrap& ranks, const evmm::driver& on) {
  if (ranks.node_count() != 1) {
    throw evmm::unsupported(
        fmt::format("{} ranks on {} nodes: this example stores into its peers' memory directly",
                    ranks.size(), ranks.node_count()),
        "run all ranks on one node");
  }
  return {ranks.node_rank() % on.device_count()};
}

std::uint64_t worst_rows(const work_split& split, const expert_placement& placement, int top_k) {
  return split.most_in_step() * static_cast<std::uint64_t>(std::min(top_k, placement.most()));
}

/// Hands out consecutive pieces of a range; from address 0 it measures how much they need.
class carver {
 public:
  explicit carver(evmm::address base) : at_(base) {}
  template <class T>
  T* take(std::size_t count) {
    const evmm::address start = (at_ + 255) / 256 * 256;
    at_ = start + count * sizeof(T);
    return reinterpret_cast<T*>(start);
  }
  evmm::address end() const { return at_; }

 private:
  evmm::address at_;
};

/// Points the step into a workspace at `base`; returns where it ends.
evmm::address lay_out(exchange_step& step, evmm::address base, std::size_t tokens) {
  const auto hidden = static_cast<std::size_t>(step.hidden);
  const auto top_k = static_cast<std::size_t>(step.top_k);
  carver from(base);
  step.x = from.take<bf16>(tokens * hidden);
  step.y = from.take<bf16>(tokens * hidden);
  step.weights = from.take<float>(tokens * top_k);
  step.targets = from.take<row_target>(tokens * top_k);
  step.counts = from.take<std::uint32_t>(static_cast<std::size_t>(step.experts));
  step.expert_starts = from.take<std::uint32_t>(static_cast<std::size_t>(step.local_experts) + 1);
  step.timed_out = from.take<std::uint64_t>(1);
  return from.end();
}

/// What does not change from step to step.
exchange_step first_step(const evmm::bootstrap& ranks, const routing& trace, int hidden) {
  const expert_placement placement{trace.experts, ranks.size()};
  exchange_step made;
  made.layout = region_layout::of(ranks.size(), trace.experts);
  made.top_k = trace.top_k;
  made.hidden = hidden;
  made.experts = trace.experts;
  made.first_expert = placement.first(ranks.rank().value);
  made.local_experts = placement.count(ranks.rank().value);
  return made;
}

evmm::symmetric_options region_options(evmm::device_id device, std::uint64_t bytes,
                                       std::size_t granularity) {
  evmm::symmetric_options made;
  made.device = device;
  // At least four units, so that even a toy run has two DEVICE segments and a tail.
  made.reserve = std::max<std::size_t>(bytes, 4 * granularity);
  return made;
}

evmm::region_options workspace_options(evmm::device_id device, std::size_t bytes) {
  evmm::region_options made;
  made.device = device;
  made.reserve = bytes;
  made.max_segments = 1;
  made.share = evmm::share_kind::none;
  return made;
}

}  // namespace

owned_stream::owned_stream(std::shared_ptr<evmm::driver> on, evmm::device_id device)
    : on_(std::move(on)), stream_(on_->create_stream(device)) {}

owned_stream::~owned_stream() {
  try {
    on_->synchronize(stream_);
    on_->destroy_stream(stream_);
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "draining the stream: %s\n", failure.what());
  }
}

exchange::exchange(std::shared_ptr<evmm::bootstrap> ranks, std::shared_ptr<evmm::driver> on,
                   const options& wanted, const routing& trace)
    : ranks_(std::move(ranks)),
      on_(std::move(on)),
      wanted_(wanted),
      trace_(trace),
      device_(pick_device(*ranks_, *on_)),
      placement_{trace.experts, ranks_->size()},
      split_{trace.tokens(), ranks_->size(), wanted.steps, wanted.tokens},
      step_(first_step(*ranks_, trace, wanted.hidden)),
      workspace_(on_, workspace_options(device_, lay_out(step_, 0, split_.most_in_rank()))),
      region_(ranks_, on_,
              region_options(device_,
                             step_.layout.rows +
                                 worst_rows(split_, placement_, trace.top_k) * step_.row_bytes(),
                             on_->granularity(evmm::memory_location::on(device_)))),
      stream_(on_, device_),
      ops_(make_ops(on_,
                    {.device = device_, .stream = stream_.get(), .patience = ranks_->timeout()})),
      used_(static_cast<std::size_t>(ranks_->size())) {
  record_.driver = fmt::format("{} {}", on_->info().name, on_->info().version);
  record_.routing = fmt::format("{} ({} tokens, top-{} of {})", trace.source, trace.tokens(),
                                trace.top_k, trace.experts);
  record_.ranks = ranks_->size();
  record_.steps = wanted.steps;
  record_.hidden = wanted.hidden;
  record_.top_k = trace.top_k;
  record_.repeat = wanted.repeat;
  record_.row_bytes = step_.row_bytes();
  record_.rows_offset = step_.layout.rows;
  record_.device_cap = wanted.device_cap;
  record_.worst_rows = worst_rows(split_, placement_, trace.top_k);
  const auto parts = static_cast<std::uint64_t>(ranks_->size());
  record_.expected_rows =
      (split_.most_in_step() * static_cast<std::uint64_t>(trace.top_k) + parts - 1) / parts;

  make_workspace();
  make_region();
  describe_ranks();
  note_moment("start");
}

void exchange::make_workspace() {
  workspace_.grow(evmm::tier::device, workspace_.reserved());
  lay_out(step_, reinterpret_cast<evmm::address>(workspace_.data()), split_.most_in_rank());
  upload(step_.timed_out, std::vector<std::uint64_t>{0});
}

void exchange::make_region() {
  const std::size_t unit = region_.granularity();
  // The smallest room of any rank, since segments are equal on all.
  const std::size_t free = on_->usage(evmm::memory_location::on(device_)).free_bytes;
  std::size_t room = wanted_.device_cap != 0 ? std::min(wanted_.device_cap, free) : free;
  for (const std::size_t other : ranks_->all_gather_value(room, "room")) {
    room = std::min(room, other);
  }
  if (room < unit) {
    throw evmm::out_of_memory(
        fmt::format("{} of DEVICE memory are left for the region beside a workspace of {}, and a "
                    "segment takes {}",
                    size_text(room), size_text(workspace_.size()), size_text(unit)),
        wanted_.device_cap != 0 && wanted_.device_cap < free
            ? "raise --device-cap, or take fewer tokens"
            : "take fewer tokens, or a device with more memory (EVMM_HOST_DEVICE_BYTES)");
  }
  const std::size_t expected =
      round_up(step_.layout.rows + record_.expected_rows * record_.row_bytes);
  std::size_t device_bytes = std::min(std::max(expected, 2 * unit), room / unit * unit);

  // Ranks that share a device may find less than each of them saw: half, then, on all of them.
  while (region_.size() == 0) {
    try {
      const std::size_t first = std::max(round_up(step_.layout.rows), round_up(device_bytes / 2));
      region_.grow(evmm::tier::device, first);
      if (device_bytes > first) region_.grow(evmm::tier::device, device_bytes - first);
    } catch (const evmm::out_of_memory&) {
      if (region_.size() != 0) break;  // the first segment is there, the tail takes the rest
      if (device_bytes <= unit) throw;
      device_bytes = round_up(device_bytes / 2);
    }
  }
  const std::size_t tail = std::min(round_up(expected / 2), region_.reserved() - region_.size());
  if (tail != 0) region_.grow(evmm::tier::host, tail);

  // Flags are zero before anybody's first barrier.
  step_.view = region_.view();
  on_->fill(reinterpret_cast<evmm::address>(region_.local()), std::byte{0}, step_.layout.rows,
            stream_.get());
  on_->synchronize(stream_.get());
  ranks_->barrier("flags are zero");
}

void exchange::describe_ranks() {
  const auto device = on_->describe(device_);
  const auto placement = region_.placement();
  const std::string experts = step_.local_experts == 0
                                  ? "no experts"
                                  : fmt::format("experts {}-{}", step_.first_expert,
                                                step_.first_expert + step_.local_experts - 1);
  const std::string line = fmt::format("DEVICE {} ({}, {}), {}; {}", device.id.value, device.name,
                                       size_text(device.total_bytes), experts,
                                       placement ? placement->text : "host tier not used yet");
  for (const auto& bytes :
       ranks_->all_gather(std::as_bytes(std::span{line.data(), line.size()}), "describe")) {
    record_.rank_lines.emplace_back(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  record_.device_capacity = device.total_bytes;
  for (const std::size_t other : ranks_->all_gather_value(device.total_bytes, "capacity")) {
    record_.device_capacity = std::min(record_.device_capacity, other);
  }
}

std::size_t exchange::round_up(std::uint64_t bytes) const {
  const std::size_t unit = region_.granularity();
  return (bytes + unit - 1) / unit * unit;
}

}  // namespace moe
