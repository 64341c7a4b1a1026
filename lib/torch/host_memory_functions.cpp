// SPDX-License-Identifier: Apache-2.0
// Tensors that lie in host memory where the device is full.
#include "lib/support/log.hpp"
#include "lib/torch/device_allocators.hpp"
#include "lib/torch/last_error.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

namespace {

using evmm::torch::device_allocator;
using evmm::torch::device_allocators;
using evmm::torch::guarded;
using evmm::torch::last_error;
using evmm::torch::tier_choice;

tier_choice choice(int tiers) {
  switch (tiers) {
    case EVMM_TORCH_DEVICE_THEN_HOST:
      return tier_choice::device_then_host;
    case EVMM_TORCH_HOST_ONLY:
      return tier_choice::host_only;
    default:
      throw evmm::invalid_argument(fmt::format("there are no tiers {}", tiers),
                                   "evmm_torch_tiers has those there are");
  }
}

class scoped_tiers {
 public:
  scoped_tiers(device_allocator& in, tier_choice tiers) : in_(in), tiers_(tiers) {
    in_.begin(tiers_);
  }
  ~scoped_tiers() {
    evmm::log_failure("ending the use of tiers", [&] { in_.end(tiers_); });
  }
  scoped_tiers(const scoped_tiers&) = delete;
  scoped_tiers& operator=(const scoped_tiers&) = delete;

 private:
  device_allocator& in_;
  tier_choice tiers_;
};

void* allocate(ssize_t bytes, int device, CUstream_st* stream, tier_choice tiers) {
  void* at = nullptr;
  guarded([&] {
    if (bytes < 0) {
      throw evmm::invalid_argument(fmt::format("cannot allocate {} bytes", bytes));
    }
    device_allocator& its = device_allocators::all().of(device);
    const scoped_tiers scope(its, tiers);
    at = its.allocator.allocate(static_cast<std::size_t>(bytes), stream);
  });
  return at;
}

void free(void* at, int device, tier_choice tiers) {
  if (at == nullptr) return;
  const int code = guarded([&] {
    device_allocator& its = device_allocators::all().of(device);
    if (its.process.forked()) return;
    its.allocator.free(at);
    // PyTorch caches what it takes from a pool's allocator: what it frees, it has no use for.
    its.empty(tiers);
  });
  if (code != EVMM_TORCH_OK) evmm::log().error("{}", last_error::mine().message);
}

}  // namespace

void* evmm_torch_host_tier_alloc(ssize_t bytes, int device, CUstream_st* stream) {
  return allocate(bytes, device, stream, tier_choice::device_then_host);
}

void evmm_torch_host_tier_free(void* at, ssize_t, int device, CUstream_st*) {
  free(at, device, tier_choice::device_then_host);
}

void* evmm_torch_host_only_alloc(ssize_t bytes, int device, CUstream_st* stream) {
  return allocate(bytes, device, stream, tier_choice::host_only);
}

void evmm_torch_host_only_free(void* at, ssize_t, int device, CUstream_st*) {
  free(at, device, tier_choice::host_only);
}

int evmm_torch_begin_tiers(int device, int tiers) {
  return guarded([&] { device_allocators::all().of(device).begin(choice(tiers)); });
}

int evmm_torch_end_tiers(int device, int tiers) {
  return guarded([&] { device_allocators::all().of(device).end(choice(tiers)); });
}
