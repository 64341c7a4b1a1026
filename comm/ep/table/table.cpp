// SPDX-License-Identifier: Apache-2.0
#include "comm/ep/table/table_state.hpp"
#include "lib/memory/device_scope.hpp"
#include "lib/support/log.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace evmm::ep {

namespace {

constexpr int k_host_sms = 16;  ///< that saturate the host link, by far

}  // namespace

std::size_t table::state::host_bytes() {
  symmetric_region& region = heap.region();
  if (host_bytes_epoch == region.epoch()) return host_bytes_then;
  host_bytes_then = 0;
  const std::size_t begin = rows.offset();
  const std::size_t end = begin + rows.bytes();
  for (const rank_id r : region.ranks().node_ranks()) {
    for (const segment& part : region.segments(r)) {
      if (part.where.kind != tier::host) continue;
      const std::size_t from = std::max(part.offset, begin);
      const std::size_t to = std::min(part.offset + part.bytes, end);
      if (from < to) host_bytes_then += to - from;
    }
  }
  host_bytes_epoch = region.epoch();
  return host_bytes_then;
}

bool table::state::orders(std::size_t indices, const gather_options& how) {
  switch (how.order) {
    case gather_order::as_given:
      return false;
    case gather_order::by_address:
      return true;
    case gather_order::automatic:
      break;
  }
  return worth_ordering(std::min(indices, options.max_batch), options.row_bytes, host_bytes());
}

void table::state::refuse_capture(native_stream stream) const {
  if (!options.check_indices || on().capture(stream).status == capture_status::none) return;
  refuse("check_indices waits for each gather, and the stream is being captured",
         "capture without table_options::check_indices, and call check() after the launch");
}

void table::state::begin_gather(native_stream stream) {
  const capture_info capture = on().capture(stream);
  last_gather& last = capture.status == capture_status::none ? eager : captured;
  if (last.recorded && last.capture == capture.id) on().wait(stream, last.event->get());
}

void table::state::end_gather(native_stream stream) {
  const capture_info capture = on().capture(stream);
  last_gather& last = capture.status == capture_status::none ? eager : captured;
  on().record(last.event->get(), stream);
  last.capture = capture.id;
  last.recorded = true;
}

void table::state::end_write(native_stream stream) {
  if (on().capture(stream).status != capture_status::none) return;
  if (written) on().wait(stream, write->get());
  on().record(write->get(), stream);
  written = true;
}

void table::state::check_gather(std::span<const std::int64_t> indices, void* out,
                                native_stream stream, const gather_options& how) const {
  if (!indices.empty() && indices.data() == nullptr) {
    refuse("cannot gather: indices are null", "give indices in memory of the device");
  }
  if (!indices.empty() && (out == nullptr || !aligned(out))) {
    refuse(fmt::format("cannot gather into {}", out), "give rows aligned to 16 bytes");
  }
  if (how.sms < 0 || (multiprocessors > 0 && how.sms > multiprocessors)) {
    refuse(
        fmt::format("cannot gather with {} multiprocessors", how.sms),
        fmt::format("DEVICE {} has {}; give 0 for the default", device().value, multiprocessors));
  }
  refuse_capture(stream);
}

void table::state::gather(std::span<const std::int64_t> indices, void* out, native_stream stream,
                          const gather_options& how) {
  if (indices.empty()) return;
  const bool ordered = orders(indices.size(), how);
  begin_gather(stream);
  for (std::size_t first = 0; first < indices.size(); first += options.max_batch) {
    const std::size_t count = std::min(options.max_batch, indices.size() - first);
    steps->gather(shape,
                  {.indices = indices.data() + first,
                   .out = static_cast<char*>(out) + first * options.row_bytes,
                   .place = first,
                   .count = static_cast<std::uint32_t>(count),
                   .sorted_by = ordered ? bits_to_sort(shape.keys()) : key_bits{},
                   .sms = how.sms > 0        ? how.sms
                          : host_bytes() > 0 ? k_host_sms
                                             : 0},
                  scratch ? scratch.local() : nullptr, stream);
  }
  end_gather(stream);
  if (options.check_indices) check(stream);
}

table_counts table::state::counts_now(native_stream stream) {
  table_counts now;
  on().copy(address_of(&now), address_of(counts.local()), sizeof(now), stream);
  on().synchronize(stream);
  return now;
}

void table::state::check(native_stream stream) {
  const table_counts now = counts_now(stream);
  if (now.wrong_place == 0) return;
  on().fill(address_of(&counts.local()->wrong_place), std::byte{0}, sizeof(now.wrong_place),
            stream);
  on().synchronize(stream);
  refuse(fmt::format("index {} at place {}: there are {} rows", now.wrong_index,
                     now.wrong_place - 1, options.rows),
         "rows count from 0, and -1 asks for nothing. The index was left out");
}

// --- the public face ----------------------------------------------------------------------------

pending_gather::pending_gather(std::unique_ptr<state> made) : state_(std::move(made)) {}
pending_gather::pending_gather(pending_gather&&) noexcept = default;
pending_gather& pending_gather::operator=(pending_gather&&) noexcept = default;
pending_gather::~pending_gather() = default;
void pending_gather::wait(native_stream stream) const {
  state_->events->on().wait(stream, state_->event);
}
bool pending_gather::done() const {
  return state_->events->on().done(state_->event);
}

table::table(symmetric_heap& heap, const table_options& options)
    : state_(std::make_unique<state>(heap, options)) {}
table::~table() = default;

void table::gather(std::span<const std::int64_t> indices, void* out, native_stream stream,
                   const gather_options& how) {
  const device_scope scope(state_->on(), state_->device());
  state_->check_gather(indices, out, stream, how);
  state_->gather(indices, out, stream, how);
}

pending_gather table::issue_gather(std::span<const std::int64_t> indices, void* out,
                                   native_stream after, const gather_options& how) {
  state& s = *state_;
  const device_scope scope(s.on(), s.device());
  s.check_gather(indices, out, after, how);
  auto made = std::make_unique<pending_gather::state>(s.events);
  const native_stream own = s.own->get();
  s.on().record(s.issued_after->get(), after);
  s.on().wait(own, s.issued_after->get());
  s.gather(indices, out, own, how);
  s.on().record(made->event, own);
  return pending_gather(std::move(made));
}

void table::write(std::size_t first, std::span<const std::byte> rows, native_stream stream) {
  state& s = *state_;
  const std::size_t bytes = s.options.row_bytes;
  if (rows.size() % bytes != 0) {
    refuse(fmt::format("cannot write {} bytes", rows.size()),
           fmt::format("give whole rows, of {} bytes each", bytes));
  }
  const std::size_t count = rows.size() / bytes;
  if (first > s.options.rows || count > s.options.rows - first) {
    refuse(fmt::format("cannot write rows {} to {}: there are {}", first, first + count,
                       s.options.rows),
           "rows count from 0");
  }
  const device_scope scope(s.on(), s.device());
  const auto end = [&] {
    if (s.shape.sets > 0 && count > 0) {
      s.steps->drop(s.shape, caches_of::all_ranks, first, count, stream);
    }
    s.end_write(stream);
  };
  try {
    for (std::size_t done = 0; done < count;) {
      // As far as its rank's rows go.
      const std::size_t row = first + done;
      const std::size_t each = s.shape.view.rows_per_rank;
      const std::size_t part = std::min(count - done, each - row % each);
      s.on().copy(address_of(s.shape.view.row(row)), address_of(rows.data() + done * bytes),
                  part * bytes, stream);
      done += part;
    }
  } catch (...) {  // what was copied before is new all the same
    log_failure("ending a table's write that failed", end);
    throw;
  }
  end();
}

void table::scatter(std::span<const std::int64_t> indices, const void* rows, native_stream stream) {
  state& s = *state_;
  if (indices.empty()) return;
  if (indices.data() == nullptr || rows == nullptr || !aligned(rows)) {
    refuse(fmt::format("cannot scatter from {} by indices at {}", rows,
                       static_cast<const void*>(indices.data())),
           "give indices, and rows aligned to 16 bytes");
  }
  s.refuse_capture(stream);
  const device_scope scope(s.on(), s.device());
  s.steps->scatter(s.shape, indices.data(), indices.size(), static_cast<const char*>(rows), stream);
  s.end_write(stream);
  if (s.options.check_indices) s.check(stream);
}

void table::invalidate(std::size_t first, std::size_t count, native_stream stream) {
  state& s = *state_;
  if (s.shape.sets == 0 || count == 0) return;
  const device_scope scope(s.on(), s.device());
  s.steps->drop(s.shape, caches_of::this_rank, first, count, stream);
  s.end_write(stream);
}

table_statistics table::statistics(native_stream stream) {
  const device_scope scope(state_->on(), state_->device());
  const table_counts now = state_->counts_now(stream);
  return {.gathered = now.gathered, .hits = now.hits, .fetched = now.fetched};
}

void table::check(native_stream stream) {
  const device_scope scope(state_->on(), state_->device());
  state_->check(stream);
}

const table_view& table::view() const noexcept {
  return state_->shape.view;
}
const table_options& table::options() const noexcept {
  return state_->options;
}
std::size_t table::host_bytes() const {
  return state_->host_bytes();
}
bool table::orders(std::size_t indices, const gather_options& how) const {
  return state_->orders(indices, how);
}

}  // namespace evmm::ep
