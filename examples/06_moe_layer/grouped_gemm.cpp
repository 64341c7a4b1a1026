// SPDX-License-Identifier: Apache-2.0
#include "grouped_gemm.hpp"

#include <evmm/error.hpp>

#include <cuda_runtime.h>

#include <string>

// A row-major matrix is its own transpose to cuBLAS. So each product C = A B is asked for as
// C^T = B^T A^T: the second factor goes first, and what is [rows][columns] here has the leading
// dimension `columns` there.

namespace moe {

namespace {

void check(cublasStatus_t status, const char* doing) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw evmm::driver_error(std::string(doing) + ": " + cublasGetStatusString(status), {},
                           static_cast<int>(status));
}

int as_int(std::size_t value) {
  return static_cast<int>(value);
}

}  // namespace

grouped_gemm::grouped_gemm(device_memory& memory) : memory_(memory) {
  check(cublasCreate(&handle_), "cublasCreate");
  check(cublasSetStream(handle_, memory_.stream), "cublasSetStream");
  // A sum that is split into parts is added up in FP32 too.
  const int mode = CUBLAS_DEFAULT_MATH | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
  check(cublasSetMathMode(handle_, static_cast<cublasMath_t>(mode)), "cublasSetMathMode");
#if CUBLAS_VERSION >= 120500
  one_call_ = true;
#endif
}

grouped_gemm::~grouped_gemm() {
  cublasDestroy(handle_);
}

void grouped_gemm::forward(std::span<const row_group> groups, const grouped_linear& layer,
                           const bf16* x, bf16* y) {
  const int in = as_int(layer.inputs);
  const int out = as_int(layer.outputs);
  std::vector<product> all;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    if (groups[g].rows == 0) continue;
    all.push_back({CUBLAS_OP_T, CUBLAS_OP_N, out, as_int(groups[g].rows), in,
                   layer.weights + g * layer.inputs * layer.outputs, in,
                   x + groups[g].begin * layer.inputs, in, y + groups[g].begin * layer.outputs,
                   out});
  }
  run_all(all, 0);
}

void grouped_gemm::backward_inputs(std::span<const row_group> groups, const grouped_linear& layer,
                                   const bf16* of_y, bf16* of_x, bool add) {
  const int in = as_int(layer.inputs);
  const int out = as_int(layer.outputs);
  std::vector<product> all;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    if (groups[g].rows == 0) continue;
    all.push_back({CUBLAS_OP_N, CUBLAS_OP_N, in, as_int(groups[g].rows), out,
                   layer.weights + g * layer.inputs * layer.outputs, in,
                   of_y + groups[g].begin * layer.outputs, out,
                   of_x + groups[g].begin * layer.inputs, in});
  }
  run_all(all, add ? 1.0f : 0.0f);
}

void grouped_gemm::backward_weights(std::span<const row_group> groups, const grouped_linear& layer,
                                    const bf16* of_y, const bf16* x, float* of_weights) {
  const int in = as_int(layer.inputs);
  const int out = as_int(layer.outputs);
  for (std::size_t g = 0; g < groups.size(); ++g) {
    float* const to = of_weights + g * layer.inputs * layer.outputs;
    if (groups[g].rows == 0) {
      memory_.on->fill(reinterpret_cast<evmm::address>(to), std::byte{0},
                       layer.inputs * layer.outputs * sizeof(float), memory_.stream);
      continue;
    }
    // In FP32, as gradients are that many micro-batches are added to; the grouped call has only
    // outputs of the type of its inputs.
    run({CUBLAS_OP_N, CUBLAS_OP_T, in, out, as_int(groups[g].rows),
         x + groups[g].begin * layer.inputs, in, of_y + groups[g].begin * layer.outputs, out, to,
         in},
        0, CUDA_R_32F);
  }
}

void grouped_gemm::forward_wide(std::size_t rows, const grouped_linear& layer, const bf16* x,
                                float* y) {
  const int in = as_int(layer.inputs);
  const int out = as_int(layer.outputs);
  run({CUBLAS_OP_T, CUBLAS_OP_N, out, as_int(rows), in, layer.weights, in, x, in, y, out}, 0,
      CUDA_R_32F);
}

void grouped_gemm::run(const product& one, float beta, cudaDataType_t type_c) {
  const float alpha = 1;
  check(cublasGemmEx(handle_, one.op_a, one.op_b, one.m, one.n, one.k, &alpha, one.a, CUDA_R_16BF,
                     one.lda, one.b, CUDA_R_16BF, one.ldb, &beta, one.c, type_c, one.ldc,
                     CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
        "cublasGemmEx");
}

void grouped_gemm::run_all(const std::vector<product>& all, float beta) {
  if (all.empty()) return;
#if CUBLAS_VERSION >= 120500
  if (one_call_ && all.size() > 1) {
    const std::size_t count = all.size();
    std::vector<cublasOperation_t> op_a, op_b;
    std::vector<int> m, n, k, lda, ldb, ldc;
    std::vector<const void*> matrices(3 * count);
    for (std::size_t i = 0; i < count; ++i) {
      const product& one = all[i];
      op_a.push_back(one.op_a);
      op_b.push_back(one.op_b);
      m.push_back(one.m);
      n.push_back(one.n);
      k.push_back(one.k);
      lda.push_back(one.lda);
      ldb.push_back(one.ldb);
      ldc.push_back(one.ldc);
      matrices[i] = one.a;
      matrices[count + i] = one.b;
      matrices[2 * count + i] = one.c;
    }
    const std::vector<float> alphas(count, 1), betas(count, beta);
    const std::vector<int> sizes(count, 1);
    // The sizes are read here, the addresses on the device. cudaMemcpyAsync has read ordinary
    // memory when it returns; the array goes back to the allocator in the order of the stream.
    const device_array<const void*> there(memory_, matrices.size());
    if (cudaMemcpyAsync(there.data(), matrices.data(), matrices.size() * sizeof(void*),
                        cudaMemcpyHostToDevice, memory_.stream) != cudaSuccess) {
      throw evmm::driver_error("the addresses of a grouped GEMM could not be copied");
    }
    const cublasStatus_t status = cublasGemmGroupedBatchedEx(
        handle_, op_a.data(), op_b.data(), m.data(), n.data(), k.data(), alphas.data(),
        there.data(), CUDA_R_16BF, lda.data(), there.data() + count, CUDA_R_16BF, ldb.data(),
        betas.data(), const_cast<void* const*>(there.data() + 2 * count), CUDA_R_16BF, ldc.data(),
        as_int(count), sizes.data(), CUBLAS_COMPUTE_32F);
    if (status == CUBLAS_STATUS_SUCCESS) return;
    if (status != CUBLAS_STATUS_NOT_SUPPORTED) check(status, "cublasGemmGroupedBatchedEx");
    one_call_ = false;  // not for this device: a call for each group from now on
  }
#endif
  for (const product& one : all) run(one, beta, CUDA_R_16BF);
}

}  // namespace moe
