// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/ep/ep_shape.hpp"

#include <evmm/driver.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace evmm::ep {

/// Where the experts are, by node. Arrays are on the device.
struct node_map {
  int node = 0;  ///< this rank's
  int nodes = 1;
  int experts_a_rank = 0;
  int experts = 0;
  const std::int32_t* node_of = nullptr;   ///< [ranks]: of nodes in the order of their first ranks
  const std::int32_t* index_in = nullptr;  ///< [ranks]: among those of its node
};

/// A token as it crosses the network: its row, then its ids, scales and weights.
struct token_record {
  std::uint32_t row_bytes = 0;
  int scale_count = 0;
  int top_k = 0;
  EVMM_HOST_DEVICE std::size_t ids_at() const { return row_bytes; }
  EVMM_HOST_DEVICE std::size_t scales_at() const {
    return ids_at() + static_cast<std::size_t>(top_k) * sizeof(std::int64_t);
  }
  EVMM_HOST_DEVICE std::size_t weights_at() const {
    return scales_at() + static_cast<std::size_t>(scale_count) * sizeof(float);
  }
  EVMM_HOST_DEVICE std::size_t bytes() const {
    return (weights_at() + static_cast<std::size_t>(top_k) * sizeof(float) + 15) / 16 * 16;
  }
};

/// Records by node: [nodes][max_tokens].
struct record_blocks {
  char* at = nullptr;
  token_record record;
  int max_tokens = 0;
  EVMM_HOST_DEVICE char* of(int node, int index) const {
    return at + (static_cast<std::size_t>(node) * static_cast<std::size_t>(max_tokens) +
                 static_cast<std::size_t>(index)) *
                    record.bytes();
  }
};

/// The tokens that a rank sends on within its node: its own and those that came from other nodes.
struct token_batch {
  char* x = nullptr;
  float* scales = nullptr;
  std::int64_t* ids = nullptr;  ///< of experts of the node, in the order of its ranks; else -1
  float* weights = nullptr;
  /// From a row on.
  token_batch from(std::size_t row, const token_record& record) const {
    const auto scale_count = static_cast<std::size_t>(record.scale_count);
    const auto top_k = static_cast<std::size_t>(record.top_k);
    return {.x = x + row * record.row_bytes,
            .scales = scales == nullptr ? nullptr : scales + row * scale_count,
            .ids = ids + row * top_k,
            .weights = weights + row * top_k};
  }
};

/// How many of the batch came from where, for kernels.
struct batch_counts {
  static constexpr int most_nodes = 64;
  int own = 0;
  std::int32_t came[most_nodes] = {};  ///< by node; 0 for this one
};

/// What a rank does with tokens that cross nodes; see rail.hpp. Enqueued on a stream.
///
/// `places` [tokens][nodes] says which record of a node's block a token is, or -1.
class rail_steps {
 public:
  virtual ~rail_steps() = default;
  /// Makes rows of bf16 [from.count][hidden] into the batch's first: e4m3 with scales.
  virtual void quantize(const token_arrays& from, int hidden, const token_batch& to,
                        native_stream stream) = 0;

  // Blocks that are filled from their front:
  /// Finds the places of the tokens that have experts on each other node; `counts` [nodes] says how
  /// many there are.
  virtual void place(const node_map& map, const token_arrays& from, int top_k, std::int32_t* places,
                     std::int64_t* counts, native_stream stream) = 0;
  /// Writes the tokens where they go: as records, a block for each other node, and to `own`, the
  /// beginning of the batch, where their rows may lie already.
  virtual void pack(const node_map& map, const token_arrays& from, const std::int32_t* places,
                    const record_blocks& to, const token_batch& own, native_stream stream) = 0;
  /// Makes the rest of the batch: the records that came, node after node.
  virtual void unpack(const node_map& map, const record_blocks& came, const batch_counts& counts,
                      const token_batch& to, native_stream stream) = 0;

  // Blocks in which every token has a place, by its index:
  /// Does what place() and pack() do. What no token takes, here and in `own`, chooses nobody.
  virtual void pack_in_place(const node_map& map, const token_arrays& from, std::int32_t* places,
                             const record_blocks& to, const token_batch& own,
                             native_stream stream) = 0;
  /// Makes the other nodes' part of a batch that lies as the blocks do. The records then choose
  /// nobody, so that nothing is there twice when a rank does not send the next ones.
  virtual void unpack_in_place(const node_map& map, const record_blocks& came,
                               const token_batch& to, native_stream stream) = 0;

  /// Sums for each token, in the order of nodes, what its nodes made of it: `own` [tokens] here,
  /// `returned` [nodes][max_tokens] there. bf16 [hidden] each; weights' gradients likewise.
  virtual void add(const node_map& map, int count, const std::int32_t* places, int max_tokens,
                   int hidden, int top_k, const combine_output& own, const combine_output& returned,
                   const combine_output& to, native_stream stream) = 0;
};

std::unique_ptr<rail_steps> make_host_rail_steps(driver& on);
/// Throws unsupported in a build without CUDA.
std::unique_ptr<rail_steps> make_cuda_rail_steps(device_id device);

}  // namespace evmm::ep
