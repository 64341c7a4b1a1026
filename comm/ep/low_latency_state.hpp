// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/ep/ep_steps.hpp"
#include "comm/ep/fixed_rail.hpp"
#include "comm/ep/low_latency_steps.hpp"
#include "comm/ep/pinned_words.hpp"

#include <evmm/comm/symmetric_buffer.hpp>
#include <evmm/ep/low_latency.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace evmm::ep {

[[noreturn]] void refuse_low_latency(const std::string& what, const std::string& help);

/// How far a dispatch is.
enum class stage { over, sent, received, returned };

/// Buffers of one dispatch under way.
struct low_latency_buffers {
  /// All but the rest of the shape, which wire() fills in.
  low_latency_buffers(heap_source& from, const low_latency_options& options, const ep_shape& given,
                      int batch);
  void wire(int batch, std::uint64_t* dead);

  symmetric_buffer<std::uint64_t> flags, masks;
  symmetric_buffer<std::byte> x;
  symmetric_buffer<float> scales, weights;
  symmetric_buffer<std::int32_t> experts, tokens, told_rows, source_rows, plan_places, plan_first;
  symmetric_buffer<std::uint16_t> y;
  /// By expert only.
  symmetric_buffer<std::byte> expert_x;
  symmetric_buffer<float> expert_scales;
  symmetric_buffer<std::int32_t> expert_begin, expert_rows, row_experts, row_places, expert_tokens;
  symmetric_buffer<std::uint16_t> expert_y;

  ep_shape shape;
  low_latency_slot slot;
  expert_layout layout;
  stage at = stage::over;
  std::uint64_t number = 0;
};

/// What a low-latency exchange takes.
struct low_latency_memory {
  low_latency_memory(heap_source& from, const low_latency_options& options, const ep_shape& shape,
                     const job_shape& job);
  int batch;  ///< most tokens that a rank sends within its node
  std::optional<fixed_rail_buffers> across;
  symmetric_buffer<std::uint64_t> dead;
  low_latency_buffers sets[fixed_rail::k_sets];
};

struct low_latency_exchange::state {
  /// `channel` is null for ranks of one node.
  state(symmetric_heap& given, symmetric_channel* channel, const low_latency_options& wanted);
  driver& on() const { return heap.region().on(); }
  bool by_expert() const { return options.arranged == layout::by_expert; }
  static int index_of(const round& of) { return static_cast<int>(of.number_ % fixed_rail::k_sets); }
  /// The buffers of a dispatch that is at `wanted`.
  low_latency_buffers& set_of(const round& of, stage wanted, const char* call);
  token_arrays arrays_of(const tokens& from) const;
  /// With `whole`, no wait() comes after it.
  round issue(const tokens& from, bool whole, native_stream stream);
  low_latency_received wait(const round& of, low_latency_buffers& set, native_stream stream);
  low_latency_received output(const low_latency_buffers& set) const;
  /// Sums for the rail, on its own stream, and lets them cross.
  void return_sums(const round& of, const low_latency_buffers& set, native_stream stream);
  void check_output(const round& of, const void* out, const void* bias) const;

  symmetric_heap& heap;
  low_latency_options options;
  std::optional<low_latency_memory> memory;
  std::optional<pinned_words> host;
  ep_totals totals;
  std::unique_ptr<low_latency_steps> steps;
  std::unique_ptr<fixed_rail> across;     ///< where there are several nodes
  std::unique_ptr<ep_steps> local_steps;  ///< by expert: sums before they are sent
  std::uint64_t issued = 0;
};

}  // namespace evmm::ep
