// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl_follower.hpp"

#include "comm/collective_change.hpp"
#include "comm/wire.hpp"
#include "lib/support/format.hpp"
#include "lib/support/log.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace evmm {

namespace {

byte_vector pack(const std::vector<segment>& segments) {
  wire_writer out;
  for (const segment& each : segments) out.put(each);
  return out.take();
}

std::vector<segment> unpack(const byte_vector& bytes, std::size_t rank) {
  std::vector<segment> segments(bytes.size() / sizeof(segment));
  wire_reader in(bytes, fmt::format("rank {}", rank));
  for (segment& each : segments) each = in.get<segment>();
  return segments;
}

}  // namespace

nccl_follower::nccl_follower(std::shared_ptr<nccl_communicator::state> on, symmetric_region& region,
                             const nccl_range& range, nccl_kind kind)
    : on_(std::move(on)), range_(range), kind_(kind) {
  agree_on(*on_->ranks, name() + ": options", [&] {
    check_range(range);
    if (&region.ranks() != on_->ranks.get()) {
      throw invalid_argument("the region and the communicator have different bootstraps",
                             "make both from the same one");
    }
    if (region.device() != on_->device) {
      throw invalid_argument(fmt::format("the region lies on DEVICE {}, the communicator on {}",
                                         region.device().value, on_->device.value));
    }
    on_->require(
        kind == nccl_kind::user_buffer ? nccl_ability::user_buffers : nccl_ability::windows,
        name());
    check_no_capture(range.streams);
  });
  range_.streams = {};
  compare_ranges();
  register_all({region.local(), region.segments(region.rank())});
  subscription_ = region.follow({
      .concerns = [this](const region_change& change) { return takes_down(change); },
      .before_change = [this](const region_change& change) { before_change(change); },
      .take_down = [this](const region_change& change) { take_down(change); },
      .bring_up = [this](const region_change& change,
                         const region_part& part) { bring_up(change, part); },
      .gone =
          [this] {
            retire_all();
            why_down_ = "the region was closed";
          },
  });
}

nccl_follower::~nccl_follower() {
  subscription_.reset();
  retire_all();
}

std::string nccl_follower::name() const {
  return kind_ == nccl_kind::user_buffer ? "nccl_user_buffer" : "nccl_window";
}

void nccl_follower::compare_ranges() const {
  struct given {
    std::size_t offset, bytes;
    bool device_only, kernels_only;
    nccl_kind kind;
    bool operator==(const given&) const = default;
    std::string text() const {
      return fmt::format("{} bytes at {}{}{}{}", bytes, offset, device_only ? ", device_only" : "",
                         kernels_only ? ", kernels_only" : "",
                         kind == nccl_kind::symmetric_window ? ", offsets::symmetric" : "");
    }
  };
  const auto all = on_->ranks->all_gather_value(
      given{range_.offset, range_.bytes, range_.device_only, range_.kernels_only, kind_},
      name() + ": compare ranges");
  for (std::size_t r = 1; r < all.size(); ++r) {
    if (all[r] == all[0]) continue;
    throw invalid_argument(fmt::format("the range of an {} differs between ranks: rank 0 gave {}; "
                                       "rank {} gave {}",
                                       name(), all[0].text(), r, all[r].text()),
                           "give every rank the same");
  }
}

// --- following ------------------------------------------------------------------------------

bool nccl_follower::overlaps(const region_change& change) const {
  const bool before_end = range_.bytes == 0 || change.offset < range_.offset + range_.bytes;
  return before_end && change.offset + change.bytes > range_.offset;
}

bool nccl_follower::takes_down(const region_change& change) const {
  const auto touched = [&](const piece& each) {
    const std::size_t end = each.span.offset + each.span.bytes;
    if (change.kind != change_kind::grow) {
      return each.span.offset < change.offset + change.bytes && change.offset < end;
    }
    return range_.bytes == 0 && end == change.offset && joins(*on_, range_, kind_);
  };
  return std::any_of(pieces_.begin(), pieces_.end(), touched);
}

void nccl_follower::before_change(const region_change& change) const {
  const long holds = pins_.use_count() - 1;
  if (holds == 0 || !takes_down(change)) return;
  throw invalid_argument(
      fmt::format("{} of {} at {}: {} hold{} an {} there pinned", to_string(change.kind),
                  format_bytes(change.bytes), format_bytes(change.offset), holds,
                  holds > 1 ? "s keep" : " keeps", name()),
      "drop the holds of pin() first, once no graph will run with the window's handles");
}

void nccl_follower::take_down(const region_change& change) {
  if (change.kind == change_kind::grow) return;  // what grows is let go once there is more of it
  const std::size_t end = change.offset + change.bytes;
  retire([&](const piece& each) {
    return each.span.offset < end && change.offset < each.span.offset + each.span.bytes;
  });
}

void nccl_follower::bring_up(const region_change& change, const region_part& part) {
  if (!overlaps(change) && why_down_.empty()) return;
  try {
    register_all(part);
    why_down_.clear();
  } catch (const std::exception& failure) {
    why_down_ = failure.what();
    const bool asleep = change.kind == change_kind::discard;
    log().log(asleep ? logger::level::info : logger::level::warn, "an {} is down after {}: {}",
              name(), to_string(change.kind), why_down_);
  }
}

// --- registering ----------------------------------------------------------------------------

void nccl_follower::register_all(const region_part& part) {
  try {
    agree_on(*on_->ranks, name() + ": ready", [&] {
      on_->check_usable();
      check_no_capture({});
    });
    const std::vector<std::vector<segment>> of_ranks = gather_segments(part);
    std::vector<planned_piece> planned;
    // What one rank alone refuses: its environment may differ, and windows go by and by, so that it
    // may still have what another let go.
    agree_on(*on_->ranks, name() + ": plan", [&] {
      planned = plan_windows(*on_, range_, kind_, of_ranks);
      check_room(planned);
    });
    agree_on(*on_->ranks, name() + ": register", [&] { register_missing(planned, part); });
  } catch (const std::exception& failure) {
    // A call that failed on one rank leaves NCCL out of step on all.
    on_->share_breakage(failure.what());
    retire_all();
    throw;
  }
}

std::vector<std::vector<segment>> nccl_follower::gather_segments(const region_part& part) const {
  std::vector<std::vector<segment>> of_ranks;
  for (const byte_vector& bytes :
       on_->ranks->all_gather(pack(part.segments), name() + ": segments")) {
    of_ranks.push_back(unpack(bytes, of_ranks.size()));
  }
  return of_ranks;
}

void nccl_follower::check_room(const std::vector<planned_piece>& planned) const {
  if (kind_ == nccl_kind::user_buffer) return;
  std::size_t mine = 0;
  std::size_t wanted = 0;
  for (const piece& each : pieces_) mine += each.span.taken;
  for (const planned_piece& each : planned) wanted += each.taken;
  const std::size_t others = on_->taken_bytes - mine;
  if (others + wanted <= on_->window_bytes) return;
  throw unsupported(
      fmt::format("a window of {} where NCCL keeps {} a rank for windows, {} of them taken",
                  format_bytes(wanted), format_bytes(on_->window_bytes), format_bytes(others)),
      fmt::format("give the process's first communicator nccl_options::window_bytes (or set "
                  "NCCL_WIN_STRIDE) of {} or more",
                  others + wanted));
}

void nccl_follower::check_no_capture(std::span<const native_stream> streams) const {
  const auto check = [&](native_stream stream) {
    if (on_->on->capture(stream).status == capture_status::none) return;
    throw invalid_argument("NCCL cannot register while a graph is being captured",
                           "register before the capture, or after it");
  };
  check(nullptr);
  std::for_each(streams.begin(), streams.end(), check);
}

void nccl_follower::register_missing(const std::vector<planned_piece>& planned,
                                     const region_part& part) {
  const auto wanted = [&](const piece& each) {
    return std::any_of(planned.begin(), planned.end(),
                       [&](const planned_piece& next) { return next.same_span(each.span); });
  };
  retire([&](const piece& each) { return !wanted(each); });
  if (!planned.empty()) on_->warm_up();
  for (const planned_piece& next : planned) {
    const auto place = std::lower_bound(
        pieces_.begin(), pieces_.end(), next.offset,
        [](const piece& each, std::size_t offset) { return each.span.offset < offset; });
    if (place != pieces_.end() && place->span.offset == next.offset) continue;
    // Entered first: what is registered cannot be lost for want of memory.
    const auto added = pieces_.insert(place, {next, nullptr});
    try {
      added->handle = make(next, reinterpret_cast<address>(part.base) + next.offset);
    } catch (...) {
      pieces_.erase(added);
      throw;
    }
  }
}

void* nccl_follower::make(const planned_piece& next, address base) {
  if (kind_ == nccl_kind::user_buffer) return on_->register_buffer(base, next.bytes);
  const int flags =
      kind_ == nccl_kind::symmetric_window ? nccl_window_symmetric : nccl_window_default;
  return on_->register_window(base, next.bytes, next.taken, flags);
}

template <class Predicate>
void nccl_follower::retire(Predicate leaving) {
  for (std::size_t i = pieces_.size(); i-- > 0;) {
    if (!leaving(pieces_[i])) continue;
    const piece gone = pieces_[i];
    pieces_.erase(pieces_.begin() + static_cast<std::ptrdiff_t>(i));
    if (kind_ == nccl_kind::user_buffer) {
      on_->deregister_buffer(gone.handle);
    } else {
      on_->deregister_window(static_cast<ncclWindow_vidmem*>(gone.handle), gone.span.taken);
    }
  }
}

void nccl_follower::retire_all() noexcept {
  while (!pieces_.empty()) {
    log_failure("taking down an " + name(), [&] { retire([](const piece&) { return true; }); });
  }
}

// --- what users see -------------------------------------------------------------------------

void nccl_follower::check_up() const {
  if (!why_down_.empty()) {
    throw invalid_argument(fmt::format("the {} is down: {}", name(), why_down_));
  }
  on_->check_usable();
}

const nccl_follower::piece& nccl_follower::at(std::size_t offset) const {
  check_up();
  const auto next = std::upper_bound(
      pieces_.begin(), pieces_.end(), offset,
      [](std::size_t wanted, const piece& each) { return wanted < each.span.offset; });
  if (next != pieces_.begin()) {
    const piece& found = *std::prev(next);
    if (offset - found.span.offset < found.span.bytes) return found;
  }
  throw invalid_argument(
      fmt::format("offset {} is in no piece of the {}", offset, name()),
      range_.device_only ? "device_only leaves HOST_NUMA segments out; pieces() tells what is in"
                         : "pieces() tells what is in");
}

std::vector<grown> nccl_follower::spans() const {
  std::vector<grown> all;
  for (const piece& each : pieces_) all.push_back({each.span.offset, each.span.bytes});
  return all;
}

nccl_pin nccl_follower::pin() const {
  check_up();
  return pins_;
}

}  // namespace evmm
