// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "layer_math.hpp"

#include <cublas_v2.h>

namespace moe {

/// The matrix products of the layer, by cuBLAS.
class grouped_gemm {
 public:
  explicit grouped_gemm(device_memory& memory);
  ~grouped_gemm();
  grouped_gemm(const grouped_gemm&) = delete;
  grouped_gemm& operator=(const grouped_gemm&) = delete;

  /// As the members of layer_math that have these names.
  void forward(std::span<const row_group> groups, const grouped_linear& layer, const bf16* x,
               bf16* y);
  void backward_inputs(std::span<const row_group> groups, const grouped_linear& layer,
                       const bf16* of_y, bf16* of_x, bool add);
  void backward_weights(std::span<const row_group> groups, const grouped_linear& layer,
                        const bf16* of_y, const bf16* x, float* of_weights);
  /// forward() of one group in FP32: the router's logits decide who gets the token.
  void forward_wide(std::size_t rows, const grouped_linear& layer, const bf16* x, float* y);

  /// Whether one call serves all groups; else there is a call for each.
  bool in_one_call() const { return one_call_; }

 private:
  /// A product as cuBLAS has it, whose matrices are stored by columns.
  struct product {
    cublasOperation_t op_a, op_b;
    int m, n, k;
    const void* a;
    int lda;
    const void* b;
    int ldb;
    void* c;
    int ldc;
  };
  void run(const product& one, float beta, cudaDataType_t type_c);
  void run_all(const std::vector<product>& all, float beta);

  device_memory& memory_;
  cublasHandle_t handle_ = nullptr;
  bool one_call_ = false;
};

}  // namespace moe
