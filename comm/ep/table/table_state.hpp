// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/ep/owned_pool.hpp"
#include "comm/ep/table/pending_gather.hpp"
#include "comm/ep/table/table_steps.hpp"
#include "lib/memory/copier.hpp"
#include "lib/memory/scoped_stream.hpp"

#include <evmm/comm/symmetric_buffer.hpp>
#include <evmm/ep/table.hpp>
#include <evmm/error.hpp>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

namespace evmm::ep {

[[noreturn]] inline void refuse(const std::string& what, const std::string& help) {
  throw invalid_argument("ep::table: " + what, help);
}

/// Whether kernels may load and store 16 bytes there.
inline bool aligned(const void* at) {
  return reinterpret_cast<std::uintptr_t>(at) % 16 == 0;
}

inline address address_of(const void* at) {
  return reinterpret_cast<address>(at);
}

/// The last gather on ordinary streams, or in one capture.
struct last_gather {
  std::optional<scoped_event> event;
  std::uint64_t capture = 0;  ///< its id; 0 on ordinary streams
  bool recorded = false;
};

struct table::state {
  state(symmetric_heap& given, const table_options& wanted);
  ~state();

  symmetric_buffer<std::byte> make_rows();
  void check_gather(std::span<const std::int64_t> indices, void* out, native_stream stream,
                    const gather_options& how) const;
  void gather(std::span<const std::int64_t> indices, void* out, native_stream stream,
              const gather_options& how);
  /// The work on `stream` that is enqueued between these two comes after all gathers so far.
  void begin_gather(native_stream stream);
  void end_gather(native_stream stream);
  /// Behind what `stream` wrote, for the end of the table to wait for. Writes on several streams
  /// come one after the other, so that the last one stands for all.
  void end_write(native_stream stream);
  std::size_t host_bytes();
  bool orders(std::size_t indices, const gather_options& how);
  table_counts counts_now(native_stream stream);
  void check(native_stream stream);
  driver& on() const { return heap.region().on(); }
  device_id device() const { return heap.region().device(); }
  /// Throws where check_indices would wait for work that is being captured.
  void refuse_capture(native_stream stream) const;

  symmetric_heap& heap;
  table_options options;
  std::optional<owned_pool> pool;  ///< of the rows, when they have one of their own
  symmetric_buffer<std::byte> rows, copies, scratch;
  symmetric_buffer<std::uint64_t> tags;
  symmetric_buffer<table_counts> counts;
  table_shape shape;
  std::unique_ptr<table_steps> steps;
  int multiprocessors = 0;           ///< of the device; 0 where it does not tell
  std::optional<scoped_stream> own;  ///< of issued gathers
  std::shared_ptr<event_store> events;
  std::optional<scoped_event> issued_after;
  last_gather eager, captured;
  std::optional<scoped_event> write;
  bool written = false;
  std::optional<std::uint64_t> host_bytes_epoch;
  std::size_t host_bytes_then = 0;
};

}  // namespace evmm::ep
