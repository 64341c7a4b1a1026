// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/ep/exchange.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace [[gnu::visibility("default")]] evmm {
namespace ep {

/// What a low-latency exchange is made from; equal on all ranks, but for `timeout`.
struct low_latency_options {
  /// As in exchange_options.
  int experts = 0;
  int top_k = 8;
  std::size_t hidden = 0;
  payload rows = payload::fp8;
  bool quantize = true;
  /// by_expert: groups have room for every token of every rank once, and choices of an expert that
  /// the token chose before are left out when it is full.
  layout arranged = layout::by_source;
  /// Most tokens that a rank dispatches at once: times the number of nodes, at most 1,024. Receive
  /// buffers hold this many of every rank of the job, twice.
  std::size_t max_tokens = 128;
  /// Multiprocessors that a dispatch or a combine occupies while it sends.
  int sms = 24;
  /// After this a rank of the node that did not come counts as dead. Across nodes the rank may be
  /// late because others are, so give it more than they may be.
  std::chrono::milliseconds timeout = std::chrono::seconds(10);
};

/// As that of an exchange; all of it lies on the device.
heap_footprint footprint(const low_latency_options& options, const job_shape& job);

/// What a rank received, in device memory. Sources are the ranks of its node, by index there; they
/// send on what comes to them from other nodes. Rows of source s lie at [s][0, source_rows[s]), by
/// `tokens`, which ascend. Below, `ranks` are those of the node and `batch` is what each sends
/// there at most: max_tokens, times the number of nodes. A plain struct, for kernels.
struct low_latency_received {
  /// By source [ranks][batch][hidden]; by expert [local experts][ranks x batch][hidden], each group
  /// filled from its front: what a masked grouped GEMM takes.
  void* x = nullptr;
  float* scales = nullptr;          ///< for fp8: as x, with [hidden / 128]
  std::int32_t* experts = nullptr;  ///< [ranks][batch][top_k], or -1
  float* weights = nullptr;         ///< the same; 0 where experts is -1
  /// [ranks][batch]: index at the source. Across nodes n x max_tokens + t is token t of the rank of
  /// node n that has the source's index there; nodes count in the order of their first ranks.
  std::int32_t* tokens = nullptr;
  const std::int32_t* source_rows = nullptr;    ///< [ranks]; 0 for a dead one
  const std::int32_t* expert_rows = nullptr;    ///< by expert: each choice's row, as experts
  const std::int32_t* row_places = nullptr;     ///< by expert: the place each row is a copy of
  const std::int32_t* expert_tokens = nullptr;  ///< by expert [local experts]: rows of each group
};

/// Expert-parallel dispatch and combine for decoding: one step each way, no count is awaited before
/// rows are sent.
///
/// Every rank has a place for every other's rows, so that a sender knows where they go without
///   asking. There are two sets of buffers, used in turn: two dispatches may be under way at once,
///   as when the halves of a batch overlap. Each way is split. issue_dispatch() sends and
///   wait_dispatch() waits; issue_combine() tells the peers that results are there and
///   wait_combine() waits for theirs, loads and sums them. Between issue and wait nothing occupies
///   a multiprocessor within a node.
/// Nodes: a token goes to other nodes, and sums come back, as in ep::exchange. No count crosses:
///   every dispatch sends tokens::most rows to each other node, or max_tokens when that is not
///   given, and receives as many, whatever is in them; every combine as many sums. The channel's
///   check_counts finds a `most` that differs between ranks, and nothing else does. They cross on a
///   stream of the exchange's own: behind issue_dispatch() until they are sent on within the node,
///   behind issue_combine() from the node's sums on, which occupy `sms` multiprocessors while they
///   wait for its ranks. wait_...() lets its stream wait for that, and does the rest. The calls are
///   calls of the channel too: one thread at a time for both, and what it says of what blocks
///   inside CUDA holds between issue and wait as well.
/// Order on each rank: a dispatch's rows must have been read by work that comes before its
///   issue_combine() on that stream (or, if it is not combined, before the next issue_dispatch()),
///   since that tells the peers that its buffers may be written again. The calls below refuse what
///   they can see to break it.
/// Threads, streams, graphs: as ep::exchange. A captured graph holds each dispatch with its
///   combine. Across nodes nothing can be captured: unsupported.
/// Errors: what the CPU can see is an invalid_argument before anything is enqueued. A rank that
///   does not come within `timeout` is dead from then on to the others of its node: it is sent
///   nothing, waited for no more, and its part in sums is left out; the calls go on without it.
///   dead_ranks() tells. To bring it back, make a new exchange. On other nodes the channel breaks
///   at the ranks that have its index there: their calls and check() throw what the channel does,
///   what they had under way stands for nothing, and they are dead to their nodes in turn.
class low_latency_exchange {
 public:
  /// One dispatch under way: which buffers it uses.
  class round {
   public:
    /// Tokens of this rank in it.
    std::size_t tokens() const noexcept { return count_; }

   private:
    friend class low_latency_exchange;
    std::uint64_t number_ = 0;
    std::size_t count_ = 0;
    std::size_t most_ = 0;
  };

  /// Collective, as exchange: unsupported when ranks are on several nodes.
  low_latency_exchange(symmetric_heap& heap, const low_latency_options& options);
  /// The same for ranks on several nodes, as ep::exchange: close the channel before it is
  /// destroyed.
  low_latency_exchange(symmetric_heap& heap, symmetric_channel& across,
                       const low_latency_options& options);
  ~low_latency_exchange();
  low_latency_exchange(const low_latency_exchange&) = delete;
  low_latency_exchange& operator=(const low_latency_exchange&) = delete;

  /// Sends each token to the ranks of its experts. Throws invalid_argument for more than max_tokens
  /// and while the dispatch before the last is not over.
  round issue_dispatch(const tokens& from, native_stream stream);
  /// Until its rows have come.
  low_latency_received wait_dispatch(const round& of, native_stream stream);
  /// Where the user writes, behind wait_dispatch(), what the experts made of a dispatch: bf16, laid
  /// as `x` was received; weights applied by source, not applied by expert.
  void* combine_buffer(const round& of) const;
  /// Tells the peers that it may be read. By expert, sums the rows of each token first.
  void issue_combine(const round& of, native_stream stream);
  /// Until every rank's may be read; loads and sums as exchange::combine().
  void wait_combine(const round& of, void* out, const void* bias, native_stream stream);

  /// Both at once, faster than one after the other within a node.
  low_latency_received dispatch(const tokens& from, round& of, native_stream stream);
  void combine(const round& of, void* out, const void* bias, native_stream stream);

  /// Bit r: the node's rank r did not come in time, as far as work that has run has found out.
  std::uint64_t dead_ranks() const;
  /// Across nodes throws what the channel's check() throws; and once, invalid_argument when a token
  /// chose an expert that there is not.
  void check();

  const low_latency_options& options() const noexcept;

 private:
  struct state;
  std::unique_ptr<state> state_;
};

}  // namespace ep
}  // namespace evmm
