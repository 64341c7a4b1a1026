// SPDX-License-Identifier: Apache-2.0
// host_rail_steps.cpp says the same in fewer words.
#include "comm/ep/bf16_pieces.cuh"
#include "comm/ep/cuda_device.cuh"
#include "comm/ep/meet_peers.cuh"
#include "comm/ep/rail_steps.hpp"
#include "comm/ep/send_row.cuh"

namespace evmm::ep {

namespace {

constexpr int k_warps = 16;  ///< of a block
constexpr int k_place_threads = 1024;

__device__ __forceinline__ int node_of(const node_map& map, std::int64_t expert) {
  if (expert < 0 || expert >= map.experts) return -1;
  return map.node_of[static_cast<int>(expert) / map.experts_a_rank];
}

__device__ __forceinline__ std::int64_t id_here(const node_map& map, std::int64_t expert) {
  // An id that there is not stays one, for the dispatch within the node to tell.
  if (expert >= map.experts) return expert;
  if (node_of(map, expert) != map.node) return -1;
  const int rank = static_cast<int>(expert) / map.experts_a_rank;
  return map.index_in[rank] * map.experts_a_rank + static_cast<int>(expert) % map.experts_a_rank;
}

/// A block a node: the places of its tokens, in order.
__global__ void __launch_bounds__(k_place_threads)
    place_records_kernel(const __grid_constant__ node_map map,
                         const __grid_constant__ token_arrays from, int top_k, std::int32_t* places,
                         std::int64_t* counts) {
  __shared__ int warp_rows[k_place_threads / 32];
  const int node = static_cast<int>(blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  int before = 0;
  for (int first = 0; first < from.count; first += k_place_threads) {
    const int t = first + thread;
    bool goes = false;
    for (int k = 0; k < top_k && t < from.count && node != map.node; ++k) {
      goes |= node_of(map, from.ids[static_cast<std::size_t>(t) * top_k + k]) == node;
    }
    const unsigned all = __ballot_sync(k_whole_warp, goes);
    if (lane == 0) warp_rows[thread / 32] = __popc(all);
    __syncthreads();
    int here = before;
    int rows = 0;
    for (int w = 0; w < k_place_threads / 32; ++w) {
      if (w < thread / 32) here += warp_rows[w];
      rows += warp_rows[w];
    }
    if (t < from.count) {
      places[static_cast<std::size_t>(t) * map.nodes + node] =
          goes ? here + __popc(all & ((1u << lane) - 1)) : -1;
    }
    before += rows;
    __syncthreads();
  }
  if (thread == 0) counts[node] = before;
}

__device__ __forceinline__ void copy_row(char* to, const char* from, std::uint32_t bytes,
                                         int lane) {
  for (std::uint32_t i = static_cast<std::uint32_t>(lane) * 16; i < bytes; i += 32 * 16) {
    *reinterpret_cast<uint4*>(to + i) = __ldcg(reinterpret_cast<const uint4*>(from + i));
  }
}

/// A warp a token.
__global__ void __launch_bounds__(k_warps * 32)
    quantize_rows_kernel(const __grid_constant__ token_arrays from, int hidden,
                         const __grid_constant__ token_batch to) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int groups = hidden / 128;
  for (int t = static_cast<int>(blockIdx.x) * k_warps + static_cast<int>(threadIdx.x / 32);
       t < from.count; t += static_cast<int>(gridDim.x) * k_warps) {
    const auto row = static_cast<std::size_t>(t) * hidden;
    float scales[k_lane_scales];
    quantize_row(from.x + row * sizeof(__nv_bfloat16), to.x + row, groups, lane, scales);
#pragma unroll
    for (int i = 0; i < k_lane_scales; ++i) {
      const int s = lane + 32 * i;
      if (s < groups) to.scales[static_cast<std::size_t>(t) * groups + s] = scales[i];
    }
  }
}

/// One token, wherever it lies.
struct token {
  const char* x;
  const float* scales;
  const std::int64_t* ids;
  const float* weights;  ///< null for all 1
};

__device__ __forceinline__ token token_of(const token_arrays& all, const token_record& record,
                                          int t) {
  const auto at = static_cast<std::size_t>(t);
  const std::size_t choice = at * record.top_k;
  return {all.x + at * record.row_bytes, all.scales + at * record.scale_count, all.ids + choice,
          all.weights == nullptr ? nullptr : all.weights + choice};
}

__device__ __forceinline__ std::int64_t* ids_in(const token_record& record, char* at) {
  return reinterpret_cast<std::int64_t*>(at + record.ids_at());
}

__device__ __forceinline__ token token_in(const token_record& record, char* at) {
  return {at, reinterpret_cast<const float*>(at + record.scales_at()), ids_in(record, at),
          reinterpret_cast<const float*>(at + record.weights_at())};
}

__device__ __forceinline__ void write_record(const token_record& record, const token& from,
                                             char* at, int lane) {
  copy_row(at, from.x, record.row_bytes, lane);
  for (int s = lane; s < record.scale_count; s += 32) {
    reinterpret_cast<float*>(at + record.scales_at())[s] = from.scales[s];
  }
  if (lane >= record.top_k) return;
  ids_in(record, at)[lane] = from.ids[lane];
  reinterpret_cast<float*>(at + record.weights_at())[lane] =
      from.weights == nullptr ? 1 : from.weights[lane];
}

/// Makes a token the batch's at index `row`, where its own row may lie already.
__device__ __forceinline__ void join(const node_map& map, const token_record& record,
                                     const token& from, const token_batch& to, std::size_t row,
                                     int lane) {
  char* const x = to.x + row * record.row_bytes;
  if (from.x != x) {
    copy_row(x, from.x, record.row_bytes, lane);
    for (int s = lane; s < record.scale_count; s += 32) {
      to.scales[row * record.scale_count + s] = from.scales[s];
    }
  }
  if (lane >= record.top_k) return;
  to.ids[row * record.top_k + lane] = id_here(map, from.ids[lane]);
  to.weights[row * record.top_k + lane] = from.weights == nullptr ? 1 : from.weights[lane];
}

/// Calls `each(lane, item)` in the warps of the grid, one after the other, for [0, items).
template <class Each>
__device__ __forceinline__ void for_items(std::int64_t items, const Each& each) {
  const auto step = static_cast<std::int64_t>(gridDim.x) * k_warps;
  for (std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * k_warps + threadIdx.x / 32;
       item < items; item += step) {
    each(static_cast<int>(threadIdx.x % 32), item);
  }
}

/// A warp a token and node.
__global__ void __launch_bounds__(k_warps * 32)
    pack_records_kernel(const __grid_constant__ node_map map,
                        const __grid_constant__ token_arrays from, const std::int32_t* places,
                        const __grid_constant__ record_blocks to,
                        const __grid_constant__ token_batch own) {
  const token_record& record = to.record;
  for_items(static_cast<std::int64_t>(from.count) * map.nodes, [&](int lane, std::int64_t item) {
    const auto t = static_cast<int>(item / map.nodes);
    const auto node = static_cast<int>(item % map.nodes);
    if (node == map.node) {
      join(map, record, token_of(from, record, t), own, static_cast<std::size_t>(t), lane);
    } else if (places[item] >= 0) {
      write_record(record, token_of(from, record, t), to.of(node, places[item]), lane);
    }
  });
}

/// A warp a record that came.
__global__ void __launch_bounds__(k_warps * 32)
    unpack_records_kernel(const __grid_constant__ node_map map,
                          const __grid_constant__ record_blocks came,
                          const __grid_constant__ batch_counts counts,
                          const __grid_constant__ token_batch to, int records) {
  for_items(records, [&](int lane, std::int64_t item) {
    auto index = static_cast<int>(item);
    int node = 0;
    while (index >= counts.came[node]) index -= counts.came[node++];
    join(map, came.record, token_in(came.record, came.of(node, index)), to,
         static_cast<std::size_t>(counts.own + item), lane);
  });
}

/// A warp a place and node.
__global__ void __launch_bounds__(k_warps * 32)
    pack_in_place_kernel(const __grid_constant__ node_map map,
                         const __grid_constant__ token_arrays from, std::int32_t* places,
                         const __grid_constant__ record_blocks to,
                         const __grid_constant__ token_batch own) {
  const token_record& record = to.record;
  for_items(static_cast<std::int64_t>(to.max_tokens) * map.nodes, [&](int lane, std::int64_t item) {
    const auto t = static_cast<int>(item / map.nodes);
    const auto node = static_cast<int>(item % map.nodes);
    const bool there = t < from.count;
    const bool mine = lane < record.top_k;
    const std::int64_t id =
        there && mine ? from.ids[static_cast<std::size_t>(t) * record.top_k + lane] : -1;
    if (node == map.node) {
      if (there) {
        join(map, record, token_of(from, record, t), own, static_cast<std::size_t>(t), lane);
      } else if (mine) {
        own.ids[static_cast<std::size_t>(t) * record.top_k + lane] = -1;
      }
      return;
    }
    const bool goes = __any_sync(k_whole_warp, node_of(map, id) == node);
    if (there && lane == 0) places[item] = goes ? t : -1;
    if (goes) {
      write_record(record, token_of(from, record, t), to.of(node, t), lane);
    } else if (mine) {
      ids_in(record, to.of(node, t))[lane] = -1;
    }
  });
}

/// A warp a place.
__global__ void __launch_bounds__(k_warps * 32)
    unpack_in_place_kernel(const __grid_constant__ node_map map,
                           const __grid_constant__ record_blocks came,
                           const __grid_constant__ token_batch to) {
  const token_record& record = came.record;
  for_items(static_cast<std::int64_t>(map.nodes) * came.max_tokens,
            [&](int lane, std::int64_t item) {
              const auto node = static_cast<int>(item / came.max_tokens);
              if (node == map.node) return;
              char* const at = came.of(node, static_cast<int>(item % came.max_tokens));
              const auto row = static_cast<std::size_t>(item);
              const bool mine = lane < record.top_k;
              const bool taken = __any_sync(k_whole_warp, mine && ids_in(record, at)[lane] >= 0);
              if (taken) {
                join(map, record, token_in(record, at), to, row, lane);
              } else if (mine) {
                to.ids[row * record.top_k + lane] = -1;
              }
              if (mine) ids_in(record, at)[lane] = -1;  // each lane's own
            });
}

/// A warp a token.
__global__ void __launch_bounds__(k_warps * 32)
    add_nodes_kernel(const __grid_constant__ node_map map, int count, const std::int32_t* places,
                     int max_tokens, int hidden, int top_k,
                     const __grid_constant__ combine_output own,
                     const __grid_constant__ combine_output returned,
                     const __grid_constant__ combine_output to) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const auto* const bias = static_cast<const __nv_bfloat16*>(to.bias);
  for (int t = static_cast<int>(blockIdx.x) * k_warps + static_cast<int>(threadIdx.x / 32);
       t < count; t += static_cast<int>(gridDim.x) * k_warps) {
    const auto token = static_cast<std::size_t>(t);
    const std::int32_t* const place = places + token * map.nodes;
    const auto row_of = [&](int node) {
      return static_cast<std::size_t>(node) * max_tokens + place[node];
    };
    for (int i = lane * 8; i < hidden; i += 32 * 8) {
      float sum[8] = {};
      if (bias != nullptr) add(sum, load_piece(bias + token * hidden + i));
      for (int node = 0; node < map.nodes; ++node) {
        if (node == map.node) {
          add(sum,
              load_piece_once(static_cast<const __nv_bfloat16*>(own.sums) + token * hidden + i));
        } else if (place[node] >= 0) {
          add(sum, load_piece_once(static_cast<const __nv_bfloat16*>(returned.sums) +
                                   row_of(node) * hidden + i));
        }
      }
      store_piece(static_cast<__nv_bfloat16*>(to.sums) + token * hidden + i, to_piece(sum));
    }
    if (to.weight_gradients == nullptr || lane >= top_k) continue;
    float gradient = own.weight_gradients[token * top_k + lane];
    for (int node = 0; node < map.nodes; ++node) {
      if (node == map.node || place[node] < 0) continue;
      gradient += returned.weight_gradients[row_of(node) * top_k + lane];
    }
    to.weight_gradients[token * top_k + lane] = gradient;
  }
}

class cuda_rail_steps final : public rail_steps {
 public:
  explicit cuda_rail_steps(int device)
      : device_(device), blocks_(static_cast<unsigned>(2 * checked_sms(device, "sms", 0))) {
    load_kernels({reinterpret_cast<const void*>(&place_records_kernel),
                  reinterpret_cast<const void*>(&quantize_rows_kernel),
                  reinterpret_cast<const void*>(&pack_records_kernel),
                  reinterpret_cast<const void*>(&unpack_records_kernel),
                  reinterpret_cast<const void*>(&pack_in_place_kernel),
                  reinterpret_cast<const void*>(&unpack_in_place_kernel),
                  reinterpret_cast<const void*>(&add_nodes_kernel)});
  }

  void place(const node_map& map, const token_arrays& from, int top_k, std::int32_t* places,
             std::int64_t* counts, native_stream stream) override {
    const device_guard here(device_);
    place_records_kernel<<<static_cast<unsigned>(map.nodes), k_place_threads, 0, stream>>>(
        map, from, top_k, places, counts);
    check_cuda(cudaGetLastError(), "place_records_kernel");
  }
  void quantize(const token_arrays& from, int hidden, const token_batch& to,
                native_stream stream) override {
    const device_guard here(device_);
    quantize_rows_kernel<<<blocks_, k_warps * 32, 0, stream>>>(from, hidden, to);
    check_cuda(cudaGetLastError(), "quantize_rows_kernel");
  }
  void pack(const node_map& map, const token_arrays& from, const std::int32_t* places,
            const record_blocks& to, const token_batch& own, native_stream stream) override {
    const device_guard here(device_);
    pack_records_kernel<<<blocks_, k_warps * 32, 0, stream>>>(map, from, places, to, own);
    check_cuda(cudaGetLastError(), "pack_records_kernel");
  }
  void unpack(const node_map& map, const record_blocks& came, const batch_counts& counts,
              const token_batch& to, native_stream stream) override {
    const device_guard here(device_);
    int records = 0;
    for (int node = 0; node < map.nodes; ++node) records += counts.came[node];
    unpack_records_kernel<<<blocks_, k_warps * 32, 0, stream>>>(map, came, counts, to, records);
    check_cuda(cudaGetLastError(), "unpack_records_kernel");
  }
  void pack_in_place(const node_map& map, const token_arrays& from, std::int32_t* places,
                     const record_blocks& to, const token_batch& own,
                     native_stream stream) override {
    const device_guard here(device_);
    pack_in_place_kernel<<<blocks_, k_warps * 32, 0, stream>>>(map, from, places, to, own);
    check_cuda(cudaGetLastError(), "pack_in_place_kernel");
  }
  void unpack_in_place(const node_map& map, const record_blocks& came, const token_batch& to,
                       native_stream stream) override {
    const device_guard here(device_);
    unpack_in_place_kernel<<<blocks_, k_warps * 32, 0, stream>>>(map, came, to);
    check_cuda(cudaGetLastError(), "unpack_in_place_kernel");
  }
  void add(const node_map& map, int count, const std::int32_t* places, int max_tokens, int hidden,
           int top_k, const combine_output& own, const combine_output& returned,
           const combine_output& to, native_stream stream) override {
    const device_guard here(device_);
    add_nodes_kernel<<<blocks_, k_warps * 32, 0, stream>>>(map, count, places, max_tokens, hidden,
                                                           top_k, own, returned, to);
    check_cuda(cudaGetLastError(), "add_nodes_kernel");
  }

 private:
  int device_;
  unsigned blocks_;
};

}  // namespace

std::unique_ptr<rail_steps> make_cuda_rail_steps(device_id device) {
  require_kernels(device.value);
  const device_guard here(device.value);
  return std::make_unique<cuda_rail_steps>(device.value);
}

}  // namespace evmm::ep
