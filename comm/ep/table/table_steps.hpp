// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/ep/table/table_shape.hpp"

#include <evmm/driver.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace evmm::ep {

/// Which ranks' caches a step works on.
enum class caches_of : std::uint8_t { this_rank, all_ranks };

/// The steps of a table, enqueued on a stream: kernels on a GPU, host functions on the host driver.
class table_steps {
 public:
  virtual ~table_steps() = default;

  /// Device memory that a batch needs.
  virtual std::size_t scratch_bytes() const = 0;
  /// `scratch` is of scratch_bytes(), for one batch at a time.
  virtual void gather(const table_shape& shape, const gather_batch& batch, std::byte* scratch,
                      native_stream stream) = 0;
  /// Stores `count` rows where their indices say, and drops all ranks' copies of them.
  virtual void scatter(const table_shape& shape, const std::int64_t* indices, std::uint64_t count,
                       const char* rows, native_stream stream) = 0;
  /// Drops copies of rows [first, first + count).
  virtual void drop(const table_shape& shape, caches_of whose, std::uint64_t first,
                    std::uint64_t count, native_stream stream) = 0;
};

std::unique_ptr<table_steps> make_host_table_steps(driver& on);
/// For batches of at most `max_batch` indices. Throws unsupported in a build without CUDA.
std::unique_ptr<table_steps> make_cuda_table_steps(device_id device, std::uint32_t max_batch);

}  // namespace evmm::ep
