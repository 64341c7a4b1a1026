// SPDX-License-Identifier: Apache-2.0
#include "lib/allocator/pinned_state.hpp"

#include <evmm/allocator/pinned_host_allocator.hpp>

#include <utility>

namespace evmm {

namespace {

template <class Change>
void each_statistic(pinned_statistics& all, Change&& change) {
  for (auto* const one : {&all.active_requests, &all.active_bytes, &all.allocations,
                          &all.allocated_bytes, &all.requested_bytes}) {
    change(*one);
  }
  for (auto& bucket : all.buckets) {
    change(bucket.active_requests);
    change(bucket.allocations);
  }
}

}  // namespace

pinned_host_allocator::pinned_host_allocator(std::shared_ptr<driver> on, device_id device,
                                             const pinned_options& options)
    : state_(std::make_unique<state>(std::move(on), device, options)) {}

pinned_host_allocator::~pinned_host_allocator() {
  // In a forked child memory, threads and locks are the parent's.
  if (state_->process_.forked()) static_cast<void>(state_.release());
}

void* pinned_host_allocator::allocate(std::size_t bytes) {
  return state_->allocate(bytes);
}

void pinned_host_allocator::free(void* at) {
  state_->free(at);
}

bool pinned_host_allocator::record(const void* at, native_stream stream,
                                   std::optional<device_id> device) {
  return state_->record(at, stream, device.value_or(state_->device_));
}

bool pinned_host_allocator::owns(const void* at) const {
  state_->process_.check();
  const std::lock_guard lock(state_->mutex_);
  const auto* const found = state_->blocks_.find(reinterpret_cast<address>(at));
  return found != nullptr && found->use == pinned::block_use::live;
}

std::size_t pinned_host_allocator::empty_cache() {
  return state_->empty_cache();
}

void pinned_host_allocator::poll() {
  state_->process_.check();
  state_->poll();
}

pinned_statistics pinned_host_allocator::statistics() const {
  state_->process_.check();
  const std::lock_guard lock(state_->mutex_);
  return state_->counts_;
}

void pinned_host_allocator::reset_peaks() {
  state_->process_.check();
  const std::lock_guard lock(state_->mutex_);
  each_statistic(state_->counts_, [](statistic& one) { one.reset_peak(); });
}

void pinned_host_allocator::reset_totals() {
  state_->process_.check();
  const std::lock_guard lock(state_->mutex_);
  pinned_statistics& all = state_->counts_;
  each_statistic(all, [](statistic& one) { one.reset_totals(); });
  all.host_alloc = {};
  all.host_free = {};
  all.num_retries = 0;
  all.num_ooms = 0;
  for (auto& bucket : all.buckets) bucket.host_alloc = bucket.host_free = {};
}

const pinned_options& pinned_host_allocator::options() const noexcept {
  return state_->options_;
}

device_id pinned_host_allocator::device() const noexcept {
  return state_->device_;
}

}  // namespace evmm
