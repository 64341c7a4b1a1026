// SPDX-License-Identifier: Apache-2.0
#include "comm/ep/combine_kernel.cuh"
#include "comm/ep/cuda_combine.cuh"
#include "comm/ep/cuda_device.cuh"

#include <algorithm>

namespace evmm::ep {

std::size_t allow_combine(int device) {
  return allow_shared(device, reinterpret_cast<const void*>(&combine_kernel));
}

void launch_combine(const combine_place& where, const ep_shape& shape, int count,
                    const plan_arrays& by, const combine_output& to, const ep_totals& totals,
                    const combine_meeting& meeting, native_stream stream) {
  const device_guard here(where.device);
  const int chunk = combine_chunk(shape);
  const std::size_t stage = static_cast<std::size_t>(shape.ranks) *
                                static_cast<std::size_t>(chunk) * sizeof(__nv_bfloat16) +
                            sizeof(std::uint64_t);
  const std::size_t fit = where.shared / stage;
  const std::size_t stages = std::clamp<std::size_t>(fit / k_combine_warps, 2, k_most_stages);
  const auto warps =
      static_cast<unsigned>(std::clamp<std::size_t>(fit / stages, 1, k_combine_warps));
  // With few tokens, several warps share one.
  const int chunks = (shape.hidden + chunk - 1) / chunk;
  const int pieces =
      std::clamp(where.sms * static_cast<int>(warps) / std::max(count, 1), 1, chunks);
  combine_kernel<<<where.sms, warps * 32, warps * stages * stage, stream>>>(
      shape, count, pieces, chunk, static_cast<int>(stages), by, to, totals, meeting, where.rounds);
  check_cuda(cudaGetLastError(), "combine_kernel");
}

}  // namespace evmm::ep
