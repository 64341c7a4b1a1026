// SPDX-License-Identifier: Apache-2.0
#include "lib/cli/replay.hpp"

#include "lib/allocator/trace_file.hpp"
#include "lib/cli/counting_driver.hpp"
#include "lib/support/environment.hpp"
#include "lib/support/log.hpp"

#include <evmm/allocator/caching_allocator.hpp>
#include <evmm/error.hpp>
#include <evmm/host_driver.hpp>
#include <evmm/units.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <utility>

namespace evmm::cli {

namespace {

using namespace evmm::units;

constexpr device_id k_device{0};
constexpr std::size_t k_most_points = 1200;
constexpr std::size_t k_most_device = 16_TiB;  ///< what a process can reserve more than once

/// A trace as its replay needs it: no completions.
allocation_trace load(const std::string& path) {
  allocation_trace trace = read_trace(path);
  if (trace.unknown_frees != 0) {
    log().warn(
        "{}: {} frees of what was allocated before its history are left out, and with them "
        "memory that was live",
        path, trace.unknown_frees);
  }
  std::erase_if(trace.events,
                [](const trace_event& each) { return each.what == trace_event::kind::freed; });
  return trace;
}

std::shared_ptr<driver> make_driver_for(const std::string& name,
                                        const std::vector<allocation_trace>& traces) {
  const std::string wanted = name.empty() ? environment("EVMM_DRIVER").value_or("") : name;
  if (wanted == "cuda") return make_cuda_driver();
  if (wanted != "host" && (!wanted.empty() || cuda_available())) return make_driver();
  auto options = host_driver_options::from_environment();
  if (!environment("EVMM_HOST_DEVICE_BYTES")) {
    // Pages stay untouched, so size costs nothing; the factor is for what an allocator wastes.
    options.device_bytes = 256_GiB;
    for (const auto& trace : traces) {
      const std::size_t wanted = 8 * std::min(trace.peak_bytes, k_most_device / 8);
      options.device_bytes = std::max(options.device_bytes, wanted);
    }
  }
  return host_driver::make(options);
}

/// The streams of a trace; number 0 is the default one.
class streams {
 public:
  streams(driver& on, unsigned count) : on_(on) {
    while (all_.size() < count) all_.push_back(on_.create_stream(k_device));
  }
  streams(const streams&) = delete;
  streams& operator=(const streams&) = delete;
  ~streams() {
    for (const native_stream each : all_) {
      if (each != nullptr) {
        log_failure("destroying a stream of a replay", [&] { on_.destroy_stream(each); });
      }
    }
  }
  native_stream operator[](std::size_t number) const { return all_[number]; }

 private:
  driver& on_;
  std::vector<native_stream> all_ = {nullptr};
};

/// One trace on an allocator of its own.
class player {
 public:
  player(std::shared_ptr<driver> on, const allocation_trace& trace,
         const allocator_options& options)
      : trace_(trace),
        counted_(std::make_shared<counting_driver>(std::move(on))),
        streams_(*counted_, trace.streams),
        allocator_(std::in_place, counted_, k_device, options),
        at_(trace.allocations) {}

  replay_pass play(int pass) {
    const auto before = allocator_->statistics();
    const auto calls = counted_->calls();
    const auto in_calls = counted_->time_in_calls();
    if (pass == 0) allocator_->reset_peaks();
    const auto begin = std::chrono::steady_clock::now();
    events([](const trace_event&) {});
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
    const auto after = allocator_->statistics();
    replay_pass played = {.trace = trace_.source,
                          .pass = pass,
                          .events = trace_.events.size(),
                          .ns_per_event = took.count() / static_cast<double>(trace_.events.size()),
                          .peak_allocated_bytes = after.allocated_bytes.all.peak,
                          .peak_reserved_bytes = after.reserved_bytes.all.peak,
                          .driver_calls = counted_->calls() - calls,
                          .time_in_driver_calls_ns = (counted_->time_in_calls() - in_calls).count(),
                          .segments = after.segment.all.current,
                          .created_handles = after.num_device_alloc - before.num_device_alloc,
                          .recycled_handles = after.handles_recycled - before.handles_recycled,
                          .claimed_handles = after.handles_claimed - before.handles_claimed};
    free_all();
    return played;
  }

  replay_curve record() {
    replay_curve curve = {.trace = trace_.source,
                          .events = trace_.events.size(),
                          .events_a_point = 1 + (trace_.events.size() - 1) / k_most_points,
                          .points = {}};
    std::size_t seen = 0;
    events([&](const trace_event&) {
      if (seen++ % curve.events_a_point == 0) curve.points.emplace_back();
      const auto now = allocator_->statistics();
      auto& point = curve.points.back();
      point.allocated = std::max(point.allocated, now.allocated_bytes.all.current);
      point.active = std::max(point.active, now.active_bytes.all.current);
      point.reserved = std::max(point.reserved, now.reserved_bytes.all.current);
    });
    free_all();
    return curve;
  }

 private:
  template <class After>
  void events(After&& after) {
    const trace_event* event = trace_.events.data();
    try {
      for (const trace_event* const end = event + trace_.events.size(); event != end; ++event) {
        void*& at = at_[event->id];
        if (event->what == trace_event::kind::allocate) {
          at = allocator_->allocate(event->bytes, streams_[event->stream]);
        } else {
          allocator_->free(std::exchange(at, nullptr));
        }
        after(*event);
      }
    } catch (const error& failure) {
      free_all();
      throw_error(failure.category(),
                  {.message = fmt::format("{}: event {} of {}: {}", trace_.source,
                                          event - trace_.events.data(), trace_.events.size(),
                                          failure.message()),
                   .help = failure.help(),
                   .native_code = failure.native_code(),
                   .where = failure.where()});
    }
  }

  void free_all() {
    for (void*& each : at_) allocator_->free(std::exchange(each, nullptr));
  }

  const allocation_trace& trace_;
  std::shared_ptr<counting_driver> counted_;
  streams streams_;  // outlives the allocator, which waits for them
  std::optional<caching_allocator> allocator_;
  std::vector<void*> at_;
};

}  // namespace

replay_report replay(const replay_options& options) {
  // What is wrong with a file or the configuration is found before anything is measured.
  std::vector<allocation_trace> traces;
  for (const auto& path : options.traces) traces.push_back(load(path));
  const auto configured = parse_options(options.config, options_from_environment());
  const auto on = make_driver_for(options.driver, traces);

  replay_report report;
  for (const auto& trace : traces) {
    player plays(on, trace, configured);
    for (int pass = 0; pass < options.passes; ++pass) report.passes.push_back(plays.play(pass));
  }
  if (options.curves) {
    for (const auto& trace : traces) {
      report.curves.push_back(player(on, trace, configured).record());
    }
  }
  return report;
}

}  // namespace evmm::cli
