// SPDX-License-Identifier: Apache-2.0
#include "lib/allocator/history.hpp"

#include "lib/support/log.hpp"
#include "lib/support/thread_object.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <unordered_map>
#include <utility>

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>

namespace evmm {

namespace {

std::int64_t now_us() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

std::string demangled(const char* symbol) {
  int failed = 0;
  const std::unique_ptr<char, void (*)(void*)> text(
      abi::__cxa_demangle(symbol, nullptr, nullptr, &failed), std::free);
  return failed == 0 ? text.get() : symbol;
}

}  // namespace

std::shared_ptr<const call_stack> call_stack::here() {
  void* frames[48];
  constexpr int own = 2;  // this function and the allocator's caller of it
  const int count = backtrace(frames, std::size(frames));
  auto made = std::make_shared<call_stack>();
  if (count > own) made->frames.assign(frames + own, frames + count);
  return made;
}

std::vector<stack_frame> call_stack::resolve() const {
  std::vector<stack_frame> named;
  named.reserve(frames.size());
  for (void* frame : frames) {
    Dl_info found{};
    if (dladdr(frame, &found) == 0 || found.dli_fname == nullptr) {
      named.push_back({.name = fmt::format("{}", frame), .filename = "??"});
      continue;
    }
    const auto offset =
        static_cast<std::size_t>(static_cast<char*>(frame) - static_cast<char*>(found.dli_fbase));
    named.push_back({.name = found.dli_sname != nullptr ? demangled(found.dli_sname)
                                                        : fmt::format("+{:#x}", offset),
                     .filename = found.dli_fname});
  }
  return named;
}

thread_notes& thread_notes::mine() {
  return thread_object<thread_notes>();
}

bool history::wants_stack(trace_action action) const noexcept {
  const auto level = static_cast<history_level>(stacks_.load(std::memory_order_relaxed));
  if (level == history_level::off) return false;
  return level == history_level::all || action == trace_action::alloc ||
         action == trace_action::segment_alloc || action == trace_action::segment_map ||
         action == trace_action::oom;
}

void history::update_wanted() {
  const bool heard = std::any_of(listeners_.begin(), listeners_.end(),
                                 [](const auto& listener) { return !listener.expired(); });
  wanted_.store(heard || options_.level != history_level::off, std::memory_order_relaxed);
}

void history::configure(const history_options& options) {
  const std::lock_guard lock(guard_);
  options_ = options;
  if (options.clear) {
    ring_.clear();
    next_ = 0;
    annotations_.clear();
  } else {
    std::rotate(ring_.begin(), ring_.begin() + static_cast<std::ptrdiff_t>(next_), ring_.end());
    const std::size_t kept = std::min(ring_.size(), options.max_entries);
    ring_.erase(ring_.begin(), ring_.end() - static_cast<std::ptrdiff_t>(kept));
    next_ = 0;
    trim_annotations();
  }
  stacks_.store(static_cast<std::uint8_t>(options.stacks ? options.level : history_level::off),
                std::memory_order_relaxed);
  update_wanted();
}

history_level history::level() const {
  const std::lock_guard lock(guard_);
  return options_.level;
}

void history::record(const event& what) noexcept {
  log_failure("recording an allocator event", [&] {
    const thread_notes& notes = thread_notes::mine();
    kept one{.what = what,
             .time_us = now_us(),
             .context = notes.compile_contexts.empty() ? nullptr : notes.compile_contexts.back(),
             .metadata = notes.user_metadata};
    std::vector<std::shared_ptr<listener_function>> listeners;
    {
      const std::lock_guard lock(guard_);
      for (const auto& listener : listeners_) {
        if (auto alive = listener.lock()) listeners.push_back(std::move(alive));
      }
      // Where nobody listens any more the hot path need not come here.
      if (listeners.size() < listeners_.size()) drop_deaf();
      const bool skipped =
          std::find(options_.skip.begin(), options_.skip.end(), what.action) != options_.skip.end();
      if ((options_.level == history_level::alloc || options_.level == history_level::all) &&
          !skipped && options_.max_entries > 0) {
        if (ring_.size() < options_.max_entries) {
          ring_.push_back(one);
        } else {
          ring_[next_] = one;
          next_ = (next_ + 1) % ring_.size();
        }
      }
    }
    if (listeners.empty()) return;
    const trace_entry entry = describe(one, false);
    for (const auto& listener : listeners) (*listener)(entry);
  });
}

trace_entry history::describe(const kept& one, bool stacks) const {
  return {
      .action = one.what.action,
      .device = device_.value,
      .at = one.what.at,
      .bytes = one.what.bytes,
      .stream = one.what.stream,
      .time_us = one.time_us,
      .pool = number_of(one.what.pool),
      .compile_context = one.context ? *one.context : std::string(),
      .user_metadata = one.metadata ? *one.metadata : std::string(),
      .frames = stacks && one.what.stack ? one.what.stack->resolve() : std::vector<stack_frame>()};
}

std::vector<trace_entry> history::entries() const {
  const std::lock_guard lock(guard_);
  std::vector<trace_entry> all;
  all.reserve(ring_.size());
  for (std::size_t i = 0; i < ring_.size(); ++i) {
    all.push_back(describe(ring_[(next_ + i) % ring_.size()], true));
  }
  return all;
}

void history::annotate(std::vector<std::pair<std::string, std::string>> values) {
  const std::lock_guard lock(guard_);
  annotations_.push_back({device_.value, now_us(), std::move(values)});
  trim_annotations();
}

/// As many are kept as events: a program may annotate each of its steps.
void history::trim_annotations() {
  while (annotations_.size() > options_.max_entries) annotations_.pop_front();
}

std::vector<annotation> history::annotations() const {
  const std::lock_guard lock(guard_);
  return {annotations_.begin(), annotations_.end()};
}

void history::drop_deaf() {
  std::erase_if(listeners_, [](const auto& old) { return old.expired(); });
  update_wanted();
}

caching_allocator::subscription history::listen(std::function<void(const trace_entry&)> listener) {
  auto kept_alive = std::make_shared<listener_function>(std::move(listener));
  const std::lock_guard lock(guard_);
  listeners_.push_back(kept_alive);
  drop_deaf();
  return kept_alive;
}

}  // namespace evmm
