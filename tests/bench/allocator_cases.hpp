// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/allocator/trace_file.hpp"
#include "tests/bench/bench_support.hpp"
#include "tests/support/recorded_traces.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

// The cases that every allocator goes through, in the same code, so that what differs is the
// allocator. An allocator under test, a Subject, has
//
//   void* allocate(std::size_t bytes, unsigned stream);  // throws evmm::error
//   void free(void* at, unsigned stream);
//   void add_figures(benchmark::State&);                 // optional: counters of a replay
//
// from any thread; `stream` is below the number that it was made with, 0 the default stream. One
// without streams ignores it. Made anew for each case, and destroyed with all it holds.

namespace evmm::bench {

constexpr unsigned k_most_threads = 8;

/// Makes a Subject that has this many streams, the default one counted.
template <class Subject>
using maker = std::function<std::unique_ptr<Subject>(unsigned streams)>;

/// The default stream, and others of their own.
class stream_set {
 public:
  stream_set(const machine& here, unsigned count) : on_(here.on) {
    while (all_.size() < count) all_.push_back(on_->create_stream(here.device.id));
  }
  stream_set(const stream_set&) = delete;
  stream_set& operator=(const stream_set&) = delete;
  ~stream_set() {
    for (const native_stream each : all_) {
      if (each != nullptr) on_->destroy_stream(each);
    }
  }
  native_stream operator[](std::size_t number) const { return all_[number]; }
  void synchronize() const {
    for (const native_stream each : all_) on_->synchronize(each);
  }

 private:
  std::shared_ptr<driver> on_;
  std::vector<native_stream> all_ = {nullptr};
};

/// Runs a case; an error skips it with its reason.
template <class Body>
auto guarded(Body body) {
  return [body = std::move(body)](benchmark::State& state) mutable {
    try {
      body(state);
    } catch (const std::exception& failure) {
      state.SkipWithError(failure.what());
    }
  };
}

/// Numbers that are the same in every run and for every allocator.
class random_numbers {
 public:
  std::uint32_t below(std::uint32_t end) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<std::uint32_t>((state_ >> 33) % end);
  }

 private:
  std::uint64_t state_ = 20261129;
};

// --- one thread -------------------------------------------------------------------------------

/// `pair/NAME/bytes:N`: a block is allocated and freed again, on the default stream.
template <class Subject>
void add_pairs(const std::string& name, const maker<Subject>& make,
               std::initializer_list<std::size_t> sizes, const std::string& title = "pair/") {
  auto* made =
      benchmark::RegisterBenchmark((title + name).c_str(), guarded([make](benchmark::State& state) {
                                     const auto subject = make(1);
                                     const auto bytes = static_cast<std::size_t>(state.range(0));
                                     subject->free(subject->allocate(bytes, 0), 0);
                                     for (auto _ : state) {
                                       void* at = subject->allocate(bytes, 0);
                                       benchmark::DoNotOptimize(at);
                                       subject->free(at, 0);
                                     }
                                     state.SetItemsProcessed(state.iterations());
                                   }));
  made->UseRealTime()->ArgName("bytes");
  for (const auto size : sizes) made->Arg(static_cast<std::int64_t>(size));
}

/// `live_1000/NAME`: 1,000 blocks are live, each of 512 B to 8 MiB; one of them is freed and
/// another one allocated in its place. Measured are hits in the cache: a million pairs, or a second
/// of them, go before and outside the time, in which the subject takes the memory that it needs.
template <class Subject>
void add_live(const std::string& name, const maker<Subject>& make) {
  auto* made = benchmark::RegisterBenchmark(
      ("live_1000/" + name).c_str(), guarded([make](benchmark::State& state) {
        const auto subject = make(1);
        std::array<void*, 1000> live{};
        random_numbers random;
        const auto allocate = [&] {
          return subject->allocate(std::size_t{512} << random.below(15), 0);
        };
        const auto replace_one = [&] {
          void*& chosen = live[random.below(live.size())];
          subject->free(chosen, 0);
          chosen = allocate();
          benchmark::DoNotOptimize(chosen);
        };
        for (void*& each : live) each = allocate();
        const auto settled = std::chrono::steady_clock::now() + std::chrono::seconds(1);
        for (int pairs = 0; pairs < 1'000'000; ++pairs) {
          if (pairs % 64 == 0 && std::chrono::steady_clock::now() > settled) break;
          replace_one();
        }
        for (auto _ : state) replace_one();
        for (void* each : live) subject->free(each, 0);
        state.SetItemsProcessed(state.iterations());
      }));
  made->UseRealTime();
}

// --- threads ----------------------------------------------------------------------------------

/// Threads of a case find the same Subject, made by the first of them, gone with the last.
template <class Subject>
class meeting_point {
 public:
  explicit meeting_point(maker<Subject> make) : make_(std::move(make)) {}
  std::shared_ptr<Subject> join() {
    const std::lock_guard lock(mutex_);
    auto subject = current_.lock();
    if (!subject) {
      subject = make_(k_most_threads + 1);
      current_ = subject;
    }
    return subject;
  }

 private:
  maker<Subject> make_;
  std::mutex mutex_;
  std::weak_ptr<Subject> current_;
};

/// `own_streams/NAME/threads:N` and `shared_stream/NAME/threads:N`: each thread allocates and frees
/// 64 KiB, on a stream of its own, or all on one. The time is that of a pair by the number of
/// threads, items_per_second the pairs of all threads together.
template <class Subject>
void add_threads(const std::string& name, const maker<Subject>& make, bool shared_stream) {
  constexpr std::size_t bytes = std::size_t{64} << 10;
  const auto meeting = std::make_shared<meeting_point<Subject>>(make);
  auto* made = benchmark::RegisterBenchmark(
      ((shared_stream ? "shared_stream/" : "own_streams/") + name).c_str(),
      guarded([meeting, shared_stream](benchmark::State& state) {
        const auto subject = meeting->join();
        const unsigned stream = shared_stream ? 1 : 1 + static_cast<unsigned>(state.thread_index());
        subject->free(subject->allocate(bytes, stream), stream);
        for (auto _ : state) {
          void* at = subject->allocate(bytes, stream);
          benchmark::DoNotOptimize(at);
          subject->free(at, stream);
        }
        state.SetItemsProcessed(state.iterations());
      }));
  made->UseRealTime();
  for (int threads = 1; threads <= static_cast<int>(k_most_threads); threads *= 2) {
    made->Threads(threads);
  }
}

// --- recorded traces --------------------------------------------------------------------------

/// A trace without completions of frees, and the blocks of a pass over it.
template <class Subject>
class pass_over {
 public:
  explicit pass_over(const allocation_trace& trace) : trace_(trace), at_(trace.allocations) {}

  /// Seconds. What it leaves allocated is freed outside the time.
  double run(Subject& subject) {
    const double took = seconds([&] {
      for (const trace_event& event : trace_.events) {
        auto& [at, stream] = at_[event.id];
        if (event.what == trace_event::kind::allocate) {
          stream = event.stream;
          at = subject.allocate(event.bytes, stream);
        } else {
          subject.free(std::exchange(at, nullptr), stream);
        }
      }
    });
    for (auto& [at, stream] : at_) {
      if (at != nullptr) subject.free(std::exchange(at, nullptr), stream);
    }
    return took;
  }

 private:
  struct block {
    void* at = nullptr;
    unsigned stream = 0;
  };
  const allocation_trace& trace_;
  std::vector<block> at_;
};

/// `replay_first/TRACE/NAME` and `replay_warm/TRACE/NAME`: a pass through a new allocator, and one
/// through an allocator that another pass has warmed. The counter ns_per_event is the time by the
/// number of allocations and frees.
template <class Subject>
void add_replays(const std::string& name, const maker<Subject>& make,
                 const std::vector<std::shared_ptr<const allocation_trace>>& traces) {
  for (const auto& trace : traces) {
    for (const bool warm : {false, true}) {
      const std::string title = std::string(warm ? "replay_warm/" : "replay_first/") +
                                test::trace_name(trace->source) + "/" + name;
      auto* made = benchmark::RegisterBenchmark(
          title.c_str(), guarded([make, trace, warm](benchmark::State& state) {
            pass_over<Subject> pass(*trace);
            std::unique_ptr<Subject> subject;
            double sum = 0;
            for (auto _ : state) {
              if (!warm || !subject) {
                subject.reset();  // before the next: it may need the memory
                subject = make(trace->streams);
                if (warm) pass.run(*subject);
              }
              const double took = pass.run(*subject);
              state.SetIterationTime(took);
              sum += took;
            }
            const auto events =
                static_cast<std::int64_t>(trace->events.size()) * state.iterations();
            state.SetItemsProcessed(events);
            state.counters["ns_per_event"] = sum * 1e9 / static_cast<double>(events);
            if constexpr (requires { subject->add_figures(state); }) {
              if (subject) subject->add_figures(state);
            }
          }));
      made->UseManualTime()->Unit(benchmark::kMillisecond);
    }
  }
}

/// Counters of a replay from what an allocator tells.
inline void set_peaks(benchmark::State& state, std::int64_t allocated, std::int64_t reserved) {
  state.counters["peak_allocated"] = static_cast<double>(allocated);
  state.counters["peak_reserved"] = static_cast<double>(reserved);
  state.counters["reserved_over_allocated"] =
      allocated == 0 ? 0 : static_cast<double>(reserved) / static_cast<double>(allocated);
}

/// The recorded traces that are here, without completions of frees.
inline std::vector<std::shared_ptr<const allocation_trace>> load_traces() {
  std::vector<std::shared_ptr<const allocation_trace>> loaded;
  for (const auto& path : test::recorded_traces()) {
    auto trace = std::make_shared<allocation_trace>(read_trace(path));
    std::erase_if(trace->events,
                  [](const trace_event& each) { return each.what == trace_event::kind::freed; });
    loaded.push_back(std::move(trace));
  }
  return loaded;
}

inline constexpr auto k_pair_sizes = {std::size_t{512},      std::size_t{4} << 10,
                                      std::size_t{64} << 10, std::size_t{1} << 20,
                                      std::size_t{4} << 20,  std::size_t{64} << 20};

/// `pinned_pair/NAME/bytes:N`: the same for page-locked host memory.
template <class Subject>
void add_pinned_pairs(const std::string& name, const maker<Subject>& make) {
  add_pairs(name, make, {std::size_t{4} << 10, std::size_t{1} << 20, std::size_t{64} << 20},
            "pinned_pair/");
}

/// All of the above but for pinned memory.
template <class Subject>
void add_all_cases(const std::string& name, const maker<Subject>& make,
                   const std::vector<std::shared_ptr<const allocation_trace>>& traces) {
  add_pairs(name, make, k_pair_sizes);
  add_live(name, make);
  add_threads(name, make, false);
  add_threads(name, make, true);
  add_replays(name, make, traces);
}

}  // namespace evmm::bench
