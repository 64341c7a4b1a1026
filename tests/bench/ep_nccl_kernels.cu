// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/ep_nccl_kernels.hpp"

#include <evmm/error.hpp>

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <string>

namespace evmm::bench {

namespace {

constexpr unsigned k_threads = 256;

void check(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  throw driver_error(std::string(call) + ": " + cudaGetErrorString(code), {}, code);
}

// A block a row.
template <class Word>
__global__ void permute_kernel(const Word* from, Word* send, Word* received_from_self,
                               std::size_t words, const __grid_constant__ send_order order) {
  const auto slot = static_cast<int>(blockIdx.x);
  const Word* row = from + static_cast<std::size_t>(order.tokens[slot]) * words;
  const bool self = slot >= order.self_begin && slot < order.self_end;
  Word* to = self ? received_from_self + static_cast<std::size_t>(slot - order.self_begin) * words
                  : send + static_cast<std::size_t>(slot) * words;
  for (std::size_t i = threadIdx.x; i < words; i += blockDim.x) to[i] = row[i];
}

struct alignas(16) bf16x8 {
  __nv_bfloat162 pairs[4];
};

// A block a token.
__global__ void reduce_kernel(const bf16x8* returned, const bf16x8* made_by_self, bf16x8* out,
                              std::size_t pieces, const __grid_constant__ send_order order) {
  const std::size_t token = blockIdx.x;
  const std::int32_t* slots = order.slots + token * static_cast<std::size_t>(order.ranks);
  const float* weights = order.weights + token * static_cast<std::size_t>(order.ranks);
  for (std::size_t i = threadIdx.x; i < pieces; i += blockDim.x) {
    float sum[8] = {};
#pragma unroll 4
    for (int r = 0; r < order.ranks; ++r) {
      const int slot = slots[r];
      if (slot < 0) continue;
      const bool self = slot >= order.self_begin && slot < order.self_end;
      const bf16x8* row =
          self ? made_by_self + static_cast<std::size_t>(slot - order.self_begin) * pieces
               : returned + static_cast<std::size_t>(slot) * pieces;
      const bf16x8 piece = row[i];
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const float2 pair = __bfloat1622float2(piece.pairs[p]);
        sum[2 * p] += weights[r] * pair.x;
        sum[2 * p + 1] += weights[r] * pair.y;
      }
    }
    bf16x8 result;
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      result.pairs[p] = __floats2bfloat162_rn(sum[2 * p], sum[2 * p + 1]);
    }
    out[token * pieces + i] = result;
  }
}

}  // namespace

cuda_array::cuda_array(std::size_t bytes) {
  void* made = nullptr;
  check(cudaMalloc(&made, bytes == 0 ? 1 : bytes), "cudaMalloc");
  at_.reset(static_cast<char*>(made));
}

cuda_array::cuda_array(const void* from, std::size_t bytes) : cuda_array(bytes) {
  check(cudaMemcpy(at_.get(), from, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
}

void cuda_array::deleter::operator()(char* at) const {
  (void)cudaFree(at);
}

void permute_rows(const void* from, void* send, void* received_from_self, std::size_t row_bytes,
                  const send_order& order, native_stream stream) {
  if (order.rows == 0) return;
  const auto launch = [&]<class Word>(Word) {
    permute_kernel<<<static_cast<unsigned>(order.rows), k_threads, 0, stream>>>(
        static_cast<const Word*>(from), static_cast<Word*>(send),
        static_cast<Word*>(received_from_self), row_bytes / sizeof(Word), order);
  };
  if (row_bytes % sizeof(uint4) == 0) {
    launch(uint4{});
  } else {
    launch(std::uint32_t{});
  }
  check(cudaGetLastError(), "permute_kernel");
}

void reduce_rows(const void* returned, const void* made_by_self, void* out, std::size_t hidden,
                 const send_order& order, native_stream stream) {
  if (order.count == 0) return;
  reduce_kernel<<<static_cast<unsigned>(order.count), k_threads, 0, stream>>>(
      static_cast<const bf16x8*>(returned), static_cast<const bf16x8*>(made_by_self),
      static_cast<bf16x8*>(out), hidden / 8, order);
  check(cudaGetLastError(), "reduce_kernel");
}

}  // namespace evmm::bench
