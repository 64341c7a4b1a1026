// SPDX-License-Identifier: Apache-2.0
#include "exchange.hpp"

#include "reference.hpp"
#include "report.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace moe {

void exchange::step(int index) {
  load(split_.of(index, ranks_->rank().value));
  step_record made;
  made.step = index;
  made.tokens = split_.of(index).count;
  made.seconds[static_cast<std::size_t>(phase::counts)] = timed(1, [&] {
    ops_->publish_counts(step_);
    barrier();
  });
  const exchange_plan plan = gather_counts();
  made.rows = plan.total_rows();
  make_room(plan);
  send_plan(plan, ids_);

  std::vector<std::vector<evmm::segment>> segments;
  for (int r = 0; r < ranks_->size(); ++r) segments.push_back(region_.segments({r}));
  made.traffic = count_traffic(plan, segments, step_.layout.rows, record_.row_bytes);
  for (int r = 0; r < ranks_->size(); ++r) {
    used_[static_cast<std::size_t>(r)] = step_.layout.rows + plan.rows_at(r) * record_.row_bytes;
  }

  run_phases(made);
  for (auto& seconds : made.seconds) {
    for (const double other : ranks_->all_gather_value(seconds, "phase time")) {
      seconds = std::max(seconds, other);
    }
  }
  made.mismatches = check_outputs();
  record_.steps_done.push_back(std::move(made));
  note_moment(fmt::format("step {}", index));
}

/// Makes this rank's tokens and their reference, and puts what the step needs on the device.
void exchange::load(const token_slice& slice) {
  const auto top_k = static_cast<std::size_t>(trace_.top_k);
  std::vector<float> weights;
  ids_.clear();
  for (std::size_t t = 0; t < slice.count; ++t) {
    const std::size_t from = (slice.first + t) % trace_.tokens() * top_k;
    for (std::size_t k = 0; k < top_k; ++k) {
      ids_.push_back(trace_.ids[from + k]);
      weights.push_back(trace_.weights[from + k]);
    }
  }
  const auto tokens = make_tokens(wanted_.seed, slice, wanted_.hidden);
  expected_ = reference_outputs(tokens, ids_, weights, trace_.top_k, wanted_.hidden);
  step_.tokens = static_cast<std::uint32_t>(slice.count);
  upload(step_.x, tokens);
  upload(step_.weights, weights);
  upload(step_.counts, count_rows(ids_, trace_.experts));
}

exchange_plan exchange::gather_counts() {
  std::vector<std::uint32_t> counts(static_cast<std::size_t>(placement_.ranks) *
                                    static_cast<std::size_t>(placement_.experts));
  download(counts, step_.view.local<std::uint32_t>(step_.layout.counts));
  return {placement_, std::move(counts)};
}

/// All ranks see the same counts, so all take the same decision.
void exchange::make_room(const exchange_plan& plan) {
  const std::uint64_t needed = step_.layout.rows + plan.most_rows() * record_.row_bytes;
  if (needed <= region_.size()) return;
  const std::size_t more = round_up(needed) - region_.size();
  change(fmt::format("grow HOST_NUMA by {} on demand", size_text(more)), true,
         [&] { region_.grow(evmm::tier::host, more); });
}

void exchange::send_plan(const exchange_plan& plan, const std::vector<std::int32_t>& ids) {
  const int me = ranks_->rank().value;
  step_.arrived = plan.rows_at(me);
  upload(step_.targets, plan.targets(me, ids));
  upload(step_.expert_starts, plan.expert_starts(me));
}

void exchange::run_phases(step_record& into) {
  const auto seconds = [&](phase which) -> double& {
    return into.seconds[static_cast<std::size_t>(which)];
  };
  // Dispatch and combine may be repeated, since they do not change what they read. Each phase ends
  // with a barrier: after it the phase is over on all ranks, and no buffer is reused too early.
  seconds(phase::dispatch) = timed(wanted_.repeat, [&] {
    ops_->dispatch(step_);
    barrier();
  });
  seconds(phase::experts) = timed(1, [&] {
    ops_->apply_experts(step_);
    barrier();
  });
  seconds(phase::combine) = timed(wanted_.repeat, [&] {
    ops_->combine(step_);
    barrier();
  });
}

/// Elements of the outputs, of all ranks, that differ from the reference.
std::uint64_t exchange::check_outputs() {
  std::vector<bf16> outputs(expected_.size());
  download(outputs, static_cast<const bf16*>(step_.y));
  std::uint64_t wrong = 0;
  for (const std::uint64_t other : ranks_->all_gather_value<std::uint64_t>(
           count_mismatches(outputs, expected_), "mismatches")) {
    wrong += other;
  }
  return wrong;
}

void exchange::change_after(int index) {
  const evmm::native_stream streams[] = {stream_.get()};
  const evmm::uses in_use{.streams = streams};
  const auto segments = region_.segments(ranks_->rank());
  if (index == 0) {
    const std::size_t worst = round_up(step_.layout.rows + record_.worst_rows * record_.row_bytes);
    if (worst <= region_.size()) return;
    const std::size_t more = worst - region_.size();
    change(fmt::format("grow HOST_NUMA by {} to the worst case", size_text(more)), false,
           [&] { region_.grow(evmm::tier::host, more); });
  } else if (index == 1 && segments.size() > 1 && segments[1].where.kind == evmm::tier::device) {
    change(fmt::format("migrate segment 1 ({}) to HOST_NUMA", size_text(segments[1].bytes)), false,
           [&] { region_.migrate(1, evmm::tier::host, in_use); });
    migrated_ = record_.changes.back().refusal.empty();
  } else if (index == 2 && migrated_) {
    change(fmt::format("migrate segment 1 ({}) back to DEVICE", size_text(segments[1].bytes)),
           false, [&] { region_.migrate(1, evmm::tier::device, in_use); });
  }
}

/// Makes one change, then combines the rows that are still in the buffer once more: addresses are
/// the same, so are the contents, and so must be the outputs. A change that is not required and
/// finds no memory is left out; every rank then sees the same error and the region as it was.
void exchange::change(std::string what, bool required, const std::function<void()>& act) {
  change_record made;
  made.what = std::move(what);
  const auto start = std::chrono::steady_clock::now();
  try {
    act();
  } catch (const evmm::out_of_memory& full) {
    if (required) throw;
    made.refusal = full.what();
  }
  const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
  for (const double other : ranks_->all_gather_value(spent.count(), "change time")) {
    made.seconds = std::max(made.seconds, other);
  }
  step_.view = region_.view();
  record_.most_region_bytes = std::max(record_.most_region_bytes, region_.size());

  made.checked = !record_.steps_done.empty() && !required;
  if (made.checked) {
    on_->fill(reinterpret_cast<evmm::address>(step_.y), std::byte{0xff},
              expected_.size() * sizeof(bf16), stream_.get());
    timed(1, [&] {
      ops_->combine(step_);
      barrier();
    });
    made.mismatches = check_outputs();
  }
  note_moment(made.what);
  record_.changes.push_back(std::move(made));
}

void exchange::close() {
  const evmm::native_stream streams[] = {stream_.get()};
  region_.close({.streams = streams});
}

void exchange::note_moment(std::string label) {
  moment made;
  made.label = std::move(label);
  made.epoch = region_.epoch();
  made.region_bytes = region_.size();
  for (int r = 0; r < ranks_->size(); ++r) made.segments.push_back(region_.segments({r}));
  made.used = used_;
  record_.most_region_bytes = std::max(record_.most_region_bytes, region_.size());
  record_.moments.push_back(std::move(made));
}

/// Seconds that the enqueued work takes, from all ranks being there to this rank's stream being
/// idle. With more than one repetition, one goes ahead unmeasured.
double exchange::timed(int repeat, const std::function<void()>& enqueue) {
  if (repeat > 1) enqueue();
  on_->synchronize(stream_.get());
  ranks_->barrier("phase");
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < repeat; ++i) enqueue();
  on_->synchronize(stream_.get());
  const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;

  std::vector<std::uint64_t> timed_out(1);
  download(timed_out, static_cast<const std::uint64_t*>(step_.timed_out));
  if (timed_out[0] != 0) {
    throw evmm::timed_out(
        fmt::format("rank {} waited {} s in barrier {} for a peer that did not come",
                    ranks_->rank().value, std::chrono::duration<double>(ranks_->timeout()).count(),
                    timed_out[0]),
        "a peer failed; see its message, or raise EVMM_TIMEOUT_MS");
  }
  return spent.count() / repeat;
}

void exchange::copy(const void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  on_->copy(reinterpret_cast<evmm::address>(to), reinterpret_cast<evmm::address>(from), bytes,
            stream_.get());
  on_->synchronize(stream_.get());
}

}  // namespace moe
