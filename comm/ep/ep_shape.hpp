// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/device/symmetric_view.cuh>

#include <cstddef>
#include <cstdint>

// What the steps of an exchange need to know: plain structs, passed to kernels by value and used by
// the host functions alike.

namespace evmm::ep {

/// What a flag tells. Each kind has one 64-bit word a source rank, which only grows.
enum class flag_kind : int {
  counts,    ///< the source's counts are here, and its own receive buffer may be written
  rows,      ///< rows of the source have arrived: counted by each of its blocks
  ready,     ///< the source's combine buffer may be read
  finished,  ///< the source has read this rank's combine buffer: counted by each of its blocks
};
constexpr int flag_kinds = 4;

/// The exchange as one rank sees it. Offsets are from a rank's part of the region.
struct ep_shape {
  static constexpr int most_ranks = 64;  ///< a bit each in a token's mask

  char* base = nullptr;  ///< of node rank 0
  std::uint64_t stride = 0;
  int rank = 0;
  int ranks = 1;
  int local_experts = 0;
  int top_k = 0;
  int hidden = 0;
  std::uint32_t row_bytes = 0;  ///< of dispatched rows
  bool quantize = false;        ///< rows are given as bf16 and sent as fp8
  int scale_count = 0;          ///< of a row's scales; 0 for bf16
  int blocks = 1;               ///< that do the work of a step, on every rank
  std::uint64_t timeout_ns = 0;

  std::uint64_t flags = 0;   ///< u64 [flag_kinds][ranks]
  std::uint64_t counts = 0;  ///< i32 [ranks][count_words()]: by source
  std::uint64_t x = 0;
  std::uint64_t scales = 0;
  std::uint64_t experts = 0;           ///< i32 [rows][top_k]
  std::uint64_t weights = 0;           ///< f32 [rows][top_k]
  std::uint64_t tokens = 0;            ///< i32 [rows]
  std::uint64_t y = 0;                 ///< bf16 [rows][hidden]
  std::uint64_t weight_gradients = 0;  ///< f32 [rows][top_k]

  template <class T>
  EVMM_HOST_DEVICE T* at(int of_rank, std::uint64_t offset) const {
    return reinterpret_cast<T*>(base + static_cast<std::uint64_t>(of_rank) * stride + offset);
  }
  /// The word of `source` at `of_rank`.
  EVMM_HOST_DEVICE std::uint64_t* flag(int of_rank, flag_kind kind, int source) const {
    return at<std::uint64_t>(of_rank, flags) + static_cast<std::ptrdiff_t>(kind) * ranks + source;
  }
  /// What a flag has counted when all of the source has come to the end of a round.
  EVMM_HOST_DEVICE std::uint64_t goal(flag_kind kind, std::uint64_t round) const {
    const bool each = kind == flag_kind::rows || kind == flag_kind::finished;
    return each ? round * static_cast<std::uint64_t>(blocks) : round;
  }
  /// When the rows of `source` come at `of_rank`: its own come first, then those of the next ranks.
  /// So at every rank it is another source whose rows come last, where host memory begins, and each
  /// source has its own link there.
  EVMM_HOST_DEVICE int turn(int of_rank, int source) const {
    return source - of_rank + (source < of_rank ? ranks : 0);
  }
  /// Of a row as it is given.
  EVMM_HOST_DEVICE std::uint32_t given_bytes() const {
    return quantize ? 2 * row_bytes : row_bytes;
  }
  /// A source's message: rows that it sends to each rank, then how often it chose each expert of
  /// the receiver.
  EVMM_HOST_DEVICE int count_words() const { return ranks + local_experts; }
  EVMM_HOST_DEVICE std::int32_t* count_message(int of_rank, int source) const {
    return at<std::int32_t>(of_rank, counts) + static_cast<std::ptrdiff_t>(source) * count_words();
  }
};

/// A plan's memory on one rank.
struct plan_arrays {
  std::uint64_t* masks = nullptr;  ///< [tokens]: a bit for each rank that the token goes to
  std::int32_t* places = nullptr;  ///< [tokens][ranks]: its index among what goes there; else -1
  std::int32_t* first = nullptr;   ///< [ranks]: where this rank's rows begin in each receive buffer
  std::int32_t* messages = nullptr;  ///< [ranks][count_words()]: what each peer is told
};

/// The rows that lie in a receive buffer: blocks of `stride` places, each filled from its front.
struct row_blocks {
  const std::int32_t* filled = nullptr;  ///< [blocks]
  int blocks = 1;
  int stride = 0;
  EVMM_HOST_DEVICE int places() const { return blocks * stride; }
};

/// The second copy of what a rank received: one row for each choice of one of its experts, grouped
/// by expert. All on the rank itself.
struct expert_layout {
  row_blocks rows;  ///< of what was received
  int alignment = 1;
  int stride = 0;                         ///< rows from one group to the next; 0: packed
  int capacity = 0;                       ///< rows of all groups
  std::int32_t* expert_tokens = nullptr;  ///< [local experts]
  std::int32_t* begin = nullptr;          ///< [local experts + 1]: the groups, padding included
  std::int32_t* expert_rows = nullptr;    ///< [places][top_k]: where each choice's row lies
  std::int32_t* row_experts = nullptr;    ///< [expert rows]: its expert; -1 in padding
  std::int32_t* row_places = nullptr;     ///< [expert rows]: the place it is a copy of; or -1
  char* x = nullptr;                      ///< [expert rows] of row_bytes
  float* scales = nullptr;
  char* y = nullptr;                           ///< bf16 [expert rows][hidden]
  float* weight_gradients = nullptr;           ///< [places][top_k]
  std::uint64_t* most_rows_on_host = nullptr;  ///< of all groups, in one dispatch
};

/// What a rank receives in one dispatch, and what went wrong: on the device, and once more in
/// page-locked memory that the CPU reads.
struct ep_totals {
  std::int32_t* words = nullptr;  ///< rows, then [ranks] ends of sources, then [local experts]
  std::int32_t* on_host = nullptr;
  std::uint64_t* ticket_on_host = nullptr;  ///< the latest whose counts came to `on_host`
  std::uint64_t* lost_on_host = nullptr;    ///< a bit for each rank that did not come in time
  std::uint64_t* wrong_on_host = nullptr;   ///< an expert id that there is not, plus 1; 0 for none
  std::uint64_t* most_rows_on_host = nullptr;  ///< that came in one dispatch
};

/// What a low-latency exchange knows beside its shape; of one set of buffers.
struct low_latency_slot {
  std::uint64_t told_rows = 0;  ///< offset of i32 [ranks]: how many come, as each rank stores it
  std::int32_t* source_rows = nullptr;  ///< [ranks]: how many came; 0 from the dead
  int max_tokens = 0;
  plan_arrays plan;               ///< of the tokens under way; `first` never changes
  std::uint64_t* dead = nullptr;  ///< a bit for each rank
};

/// Where a combine puts what it sums.
struct combine_output {
  void* sums = nullptr;        ///< bf16 [tokens][hidden]
  const void* bias = nullptr;  ///< the same, or null
  /// f32 [tokens][top_k], or null: what the weight_gradients of the ranks of `ids` hold.
  float* weight_gradients = nullptr;
  const std::int64_t* ids = nullptr;
};

/// One rank's tokens; see ep::tokens.
struct token_arrays {
  const char* x = nullptr;
  const float* scales = nullptr;
  const std::int64_t* ids = nullptr;
  const float* weights = nullptr;
  int count = 0;
};

}  // namespace evmm::ep
