// SPDX-License-Identifier: Apache-2.0
#include "comm/ep/cuda_device.cuh"
#include "comm/ep/table/gather_kernel.cuh"
#include "comm/ep/table/table_steps.hpp"

#include <evmm/error.hpp>

#include <cuda_runtime.h>

#include <algorithm>
#include <cub/device/device_radix_sort.cuh>
#include <string>

namespace evmm::ep {

namespace {

using buffers = cub::DoubleBuffer<std::uint32_t>;

/// Scratch memory: what is sorted, twice, and what the sort itself needs.
struct scratch_layout {
  scratch_layout(std::byte* at, std::uint32_t max_batch) {
    constexpr std::size_t align = 256;
    const std::size_t each = (max_batch * sizeof(std::uint32_t) + align - 1) / align * align;
    for (std::uint32_t** one : {&keys[0], &keys[1], &places[0], &places[1], &slots}) {
      *one = reinterpret_cast<std::uint32_t*>(at + bytes);
      bytes += each;
    }
    sort = at + bytes;
  }
  std::uint32_t* keys[2];
  std::uint32_t* places[2];
  std::uint32_t* slots;
  std::byte* sort;
  std::size_t bytes = 0;  ///< without the sort's
};

class cuda_table_steps final : public table_steps {
 public:
  cuda_table_steps(device_id device, std::uint32_t max_batch)
      : device_(device.value), max_batch_(max_batch) {
    const device_guard here(device_);
    check_cuda(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, device_),
               "cudaDeviceGetAttribute");
    buffers none;
    check_cuda(cub::DeviceRadixSort::SortPairs(nullptr, sort_bytes_, none, none,
                                               static_cast<int>(max_batch)),
               "DeviceRadixSort");
    load_kernels({reinterpret_cast<const void*>(&key_kernel),
                  reinterpret_cast<const void*>(&claim_kernel),
                  reinterpret_cast<const void*>(&gather_kernel),
                  reinterpret_cast<const void*>(&scatter_kernel),
                  reinterpret_cast<const void*>(&drop_kernel)});
  }

  std::size_t scratch_bytes() const override {
    return scratch_layout(nullptr, max_batch_).bytes + sort_bytes_;
  }

  void gather(const table_shape& shape, const gather_batch& batch, std::byte* scratch,
              native_stream stream) override {
    const device_guard here(device_);
    if (batch.sms > sms_) {
      throw invalid_argument("sms is " + std::to_string(batch.sms) + ": DEVICE " +
                                 std::to_string(device_) + " has " + std::to_string(sms_),
                             "give 0 for the default");
    }
    const unsigned warps = (batch.count + k_chunk - 1) / k_chunk;
    batch_order order;
    if (batch.sorted_by.any() || shape.sets > 0) {
      const scratch_layout room(scratch, max_batch_);
      order = {room.keys[0], room.places[0], nullptr};
      key_kernel<<<blocks(warps, sms_), k_gather_warps * 32, 0, stream>>>(shape, batch, order);
      check_cuda(cudaGetLastError(), "key_kernel");
      if (batch.sorted_by.any()) {
        buffers keys(room.keys[0], room.keys[1]);
        buffers places(room.places[0], room.places[1]);
        std::size_t bytes = sort_bytes_;
        check_cuda(cub::DeviceRadixSort::SortPairs(
                       room.sort, bytes, keys, places, static_cast<int>(batch.count),
                       batch.sorted_by.first, batch.sorted_by.last, stream),
                   "DeviceRadixSort");
        order.keys = keys.Current();
        order.places = places.Current();
      }
      if (shape.sets > 0) {
        order.slots = room.slots;
        claim_kernel<<<blocks(warps, 2 * sms_), k_gather_warps * 32, 0, stream>>>(shape, batch,
                                                                                  order);
        check_cuda(cudaGetLastError(), "claim_kernel");
      }
    }
    const unsigned pieces = (shape.view.row_bytes + k_piece_bytes - 1) / k_piece_bytes;
    const std::uint64_t items = std::uint64_t{warps} * pieces;
    gather_kernel<<<blocks(items, batch.sms > 0 ? batch.sms : sms_), k_gather_warps * 32, 0,
                    stream>>>(shape, batch, order);
    check_cuda(cudaGetLastError(), "gather_kernel");
  }

  void scatter(const table_shape& shape, const std::int64_t* indices, std::uint64_t count,
               const char* rows, native_stream stream) override {
    const device_guard here(device_);
    scatter_kernel<<<blocks(count, 2 * sms_), k_gather_warps * 32, 0, stream>>>(shape, indices,
                                                                                count, rows);
    check_cuda(cudaGetLastError(), "scatter_kernel");
  }

  void drop(const table_shape& shape, caches_of whose, std::uint64_t first, std::uint64_t count,
            native_stream stream) override {
    const device_guard here(device_);
    const bool own = whose == caches_of::this_rank;
    const int ranks = own ? 1 : shape.view.ranks;
    const std::uint64_t slots = std::uint64_t{shape.sets} * k_ways * static_cast<unsigned>(ranks);
    drop_kernel<<<blocks((slots + 31) / 32, 2 * sms_), k_gather_warps * 32, 0, stream>>>(
        shape, own ? shape.view.rank : 0, ranks, first, count);
    check_cuda(cudaGetLastError(), "drop_kernel");
  }

 private:
  /// For so many warps of work, at most `most`.
  static unsigned blocks(std::uint64_t warps, int most) {
    const std::uint64_t needed = (warps + k_gather_warps - 1) / k_gather_warps;
    return static_cast<unsigned>(
        std::clamp<std::uint64_t>(needed, 1, static_cast<std::uint64_t>(most)));
  }

  int device_;
  std::uint32_t max_batch_;
  int sms_ = 0;
  std::size_t sort_bytes_ = 0;
};

}  // namespace

std::unique_ptr<table_steps> make_cuda_table_steps(device_id device, std::uint32_t max_batch) {
  return std::make_unique<cuda_table_steps>(device, max_batch);
}

}  // namespace evmm::ep
