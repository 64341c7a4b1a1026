// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/types.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace evmm::bench {

/// Memory of the current device from the CUDA runtime, where a program without evmm has it.
class cuda_array {
 public:
  cuda_array() = default;
  explicit cuda_array(std::size_t bytes);
  /// A copy of `from`; blocks.
  template <class T>
  explicit cuda_array(const std::vector<T>& from)
      : cuda_array(from.data(), from.size() * sizeof(T)) {}
  template <class T = char>
  T* at(std::size_t byte = 0) const {
    return reinterpret_cast<T*>(at_.get() + byte);
  }

 private:
  struct deleter {
    void operator()(char* at) const;
  };
  cuda_array(const void* from, std::size_t bytes);
  std::unique_ptr<char, deleter> at_;
};

/// Where the rows that a rank sends lie: in order of their receivers, then of their tokens. Those
/// for itself, [self_begin, self_end), need no sending and lie in its receive buffer.
struct send_order {
  const std::int32_t* tokens = nullptr;  ///< [rows]: whose row it is
  const std::int32_t* slots = nullptr;   ///< [count][ranks]: the row of a token, or -1
  const float* weights = nullptr;        ///< [count][ranks]: of what comes back
  int rows = 0;
  int count = 0;  ///< of tokens
  int ranks = 1;
  int self_begin = 0;
  int self_end = 0;
};

/// Gathers rows, of a multiple of 4 bytes, into the order of sending.
void permute_rows(const void* from, void* send, void* received_from_self, std::size_t row_bytes,
                  const send_order& order, native_stream stream);
/// For each token the weighted sum, in FP32, of what came back: bf16 rows of `hidden` elements, a
/// multiple of 8.
void reduce_rows(const void* returned, const void* made_by_self, void* out, std::size_t hidden,
                 const send_order& order, native_stream stream);

}  // namespace evmm::bench
