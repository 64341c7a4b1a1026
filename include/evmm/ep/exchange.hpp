// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/comm/symmetric_channel.hpp>
#include <evmm/comm/symmetric_heap.hpp>
#include <evmm/ep/footprint.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace [[gnu::visibility("default")]] evmm {
namespace ep {

/// What a token's row is made of.
enum class payload : std::uint8_t {
  bf16,
  fp8,  ///< e4m3, with one float scale for each 128 elements
};

/// How received rows lie.
enum class layout : std::uint8_t {
  by_source,  ///< a row a token, packed, by source rank: each crosses the wire once, to its place
  by_expert,  ///< a row a choice, in groups by expert: what a grouped GEMM wants. Copied on the
              ///< rank
};

/// What an exchange is made from; equal on all ranks, but for `timeout`.
struct exchange_options {
  /// Experts of all ranks together, a multiple of their number: rank r has experts
  /// [r, r + 1) x experts / ranks.
  int experts = 0;
  /// Most experts a token chooses, up to 32.
  int top_k = 8;
  /// Elements of a token, a multiple of 128.
  std::size_t hidden = 0;
  /// Of dispatched tokens. What is combined is bf16.
  payload rows = payload::bf16;
  /// For fp8: tokens are given as bf16 and quantised as they are sent, each 128 elements by their
  /// largest magnitude.
  bool quantize = false;
  layout arranged = layout::by_source;
  /// by_expert: each group of rows begins at a multiple of this, as grouped GEMMs need it.
  std::size_t expert_alignment = 1;
  /// Most tokens that a rank dispatches at once.
  std::size_t max_tokens = 4096;
  /// Rows of the receive buffers that lie in DEVICE memory; those beyond, up to the worst case of
  /// ranks x max_tokens, lie in HOST_NUMA memory. 0: all on the device.
  std::size_t device_rows = 0;
  /// by_expert: the same for the copy, whose worst case is ranks x max_tokens x top_k rows, and
  /// padding.
  std::size_t device_expert_rows = 0;
  /// Segments that either tier's part of a buffer is made of: adapt() moves whole ones. The region
  /// needs room for them (symmetric_options::max_segments): 4 x this by source, 8 x by expert.
  int adapt_steps = 3;
  /// Multiprocessors that a dispatch or a combine occupies while it exchanges.
  int sms = 24;
  /// by_expert: those of the copies on the rank itself, which saturate its memory; 0: all.
  int local_sms = 0;
  /// After this a kernel no longer waits for a peer; see exchange::check().
  std::chrono::milliseconds timeout = std::chrono::seconds(30);
};

/// What an exchange takes of its heap, and what each plan takes besides. Exact: counted by the code
/// that takes it. Throw as the constructor does for options that cannot be.
heap_footprint footprint(const exchange_options& options, const job_shape& job);
heap_footprint plan_footprint(const exchange_options& options, const job_shape& job);

/// The tokens of one rank, in memory of its device, row after row.
struct tokens {
  const void* x = nullptr;                 ///< [count][hidden], aligned to 16
  const float* scales = nullptr;           ///< [count][hidden / 128] for fp8, unless quantised here
  const std::int64_t* topk_ids = nullptr;  ///< [count][top_k]; -1 chooses nobody
  const float* topk_weights = nullptr;     ///< [count][top_k]; null for all 1
  std::size_t count = 0;
  /// The most that any rank gives in this call, the same on all ranks; 0 when that is not known.
  /// Where low_latency_exchange crosses nodes, fewer bytes do.
  std::size_t most = 0;
};

/// What a rank received: one row for each token that chose at least one of its experts. Its own
/// come first, then those of the next ranks in turn, after the last rank those of rank 0; those of
/// a rank by the token's index there. (What exceeds device_rows thus comes from another source at
/// every rank, and over another link.) Pointers into the heap, the same in every dispatch of an
/// exchange; valid until the next one. A plain struct, for kernels.
struct received {
  /// By source [rows][hidden]; by expert [expert_begin[local experts]][hidden], where padding holds
  /// anything.
  void* x = nullptr;
  float* scales = nullptr;                      ///< for fp8: as x, with [hidden / 128]
  std::int32_t* experts = nullptr;              ///< [rows][top_k]: index among this rank's, or -1
  float* weights = nullptr;                     ///< [rows][top_k]: 0 where experts is -1
  std::int32_t* tokens = nullptr;               ///< [rows]: index at the source
  const std::int32_t* rows = nullptr;           ///< 1: how many
  const std::int32_t* source_end = nullptr;     ///< [ranks]: end of the rows of rank s, by s
  const std::int32_t* expert_tokens = nullptr;  ///< [local experts]: rows that chose it
  std::size_t capacity = 0;                     ///< rows that there is room for

  // By expert only.
  const std::int32_t* expert_begin = nullptr;  ///< [local experts + 1]: of each group's rows
  const std::int32_t* row_experts = nullptr;   ///< [expert rows]: its expert; -1 in padding
  const std::int32_t* row_places = nullptr;    ///< [expert rows]: the received row it copies; or -1
  const std::int32_t* expert_rows = nullptr;  ///< [rows][top_k]: each choice's row, where it is one
  std::size_t expert_capacity = 0;
};

/// Counts of a dispatch on the CPU.
struct row_counts {
  std::size_t rows = 0;
  std::vector<std::size_t> by_source;  ///< [ranks]
  std::vector<std::size_t> by_expert;  ///< [local experts]
  std::size_t spilled = 0;             ///< rows beyond device_rows
  /// by_expert: as received::expert_begin, the rows of all groups with their padding, and those
  /// beyond device_expert_rows.
  std::vector<std::size_t> expert_begin;
  std::size_t expert_rows = 0, spilled_expert_rows = 0;
};

class exchange;

/// Where the tokens of one dispatch went: combine needs it, and a dispatch of other contents with
/// the same routing. Memory of the heap, made by exchange::make_plan() and for that exchange alone;
/// may not outlive it. Before it is destroyed the streams of its calls must be past them.
class plan {
 public:
  plan(plan&&) noexcept;
  plan& operator=(plan&&) noexcept;
  ~plan();
  /// Tokens of this rank in it.
  std::size_t tokens() const noexcept;

 private:
  friend class exchange;
  struct state;
  explicit plan(std::unique_ptr<state> made);
  std::unique_ptr<state> state_;
};

/// Expert-parallel dispatch and combine: over loads and stores among the ranks of a node, over a
/// symmetric_channel between nodes.
///
/// Memory: buffers of a symmetric heap, sized for the worst case, of which `device_rows` lie on the
///   device. Outputs lie where the user's kernels read them: nothing is copied out. Rows in both
///   tiers have segments of their own, new ones for each exchange. Those of one that is gone are
///   free memory of the heap: where segments or memory run short, the next one gives back first
///   what is free at the heap's end, as symmetric_heap::trim() does.
/// Nodes: a token goes to each other node that has experts of it once, to the rank that has its
///   sender's index there, which sends it on as one of its own; the node's sum comes back the same
///   way, as bf16. Rows are then sorted by the rank of this node that sent them on, and `tokens`
///   are indices into what that rank sends: its own tokens, then those of each other node. A
///   dispatch waits on the CPU until counts have crossed, and nothing can be captured. Rows cross
///   as they are given: bf16 if they are quantised here.
/// Threads: one at a time; the calls are collective: the same on every rank, in the same order.
/// Streams: all work is enqueued on the stream of the call; nothing waits on the CPU but what says
///   so. A rank's received rows may be overwritten once its next dispatch begins on its stream, its
///   combine buffer once the combine is over: let other streams that use them be waited for by it.
///   Before it is destroyed the streams of its calls must be past them, on every rank.
/// Graphs: all but counts() may be captured, on all ranks alike, and replayed as often as all
///   replay it, in any mix with other calls. Number, order and shape of calls are then fixed; rows
///   and routing are read when it runs. Read `received::rows` there: counts() tells of the last
///   dispatch that ran.
/// Errors: what the CPU can see is an invalid_argument before anything is enqueued. A peer that
///   does not come within `timeout` is waited for no longer: the round goes on with what it sent
///   before, so that its results stand for nothing, and check() says so. A driver that fails
///   between the steps of a dispatch leaves this rank out of step: its later calls are
///   driver_errors.
/// Sums are made in one order, so that runs are equal bit for bit.
class exchange {
 public:
  /// Collective: takes its buffers from the heap, which must outlive it. Throws invalid_argument
  /// for options that cannot be, unsupported when ranks are on several nodes, out_of_memory.
  exchange(symmetric_heap& heap, const exchange_options& options);
  /// The same for ranks on several nodes, as many on each; `across` carries what crosses them and
  /// must outlive the exchange. Close it before it is destroyed: peers may wait for what this rank
  /// sent last.
  exchange(symmetric_heap& heap, symmetric_channel& across, const exchange_options& options);
  ~exchange();
  exchange(const exchange&) = delete;
  exchange& operator=(const exchange&) = delete;

  /// Collective, and outside of captures, as it takes memory of the heap. Waits until others are
  /// past what they did with that memory.
  plan make_plan();

  /// Sends each token to the ranks of its experts, once each, and fills `to` with where it went.
  /// Throws invalid_argument for more than max_tokens, before anything is sent.
  received dispatch(const tokens& from, plan& to, native_stream stream);
  /// Sends other rows by the same routing, which is not worked out anew: ids, as many tokens, and
  /// their order are those of the dispatch that filled the plan. This and what follows throws
  /// invalid_argument for a plan that no dispatch of this exchange has filled.
  received dispatch_again(const tokens& from, const plan& by, native_stream stream);

  /// Where the user writes what the experts made: bf16 [capacity][hidden], weights applied, by
  /// source; [expert_capacity][hidden], weights not applied, by expert.
  void* combine_buffer() const;
  /// Sums, for each token of the plan, the rows of all ranks that it went to, in FP32 and in the
  /// order of ranks. By expert, the rows of a rank's experts are summed there first, times their
  /// weights, and rounded to bf16. `out` and `bias` (or null) are bf16 [tokens][hidden] on the
  /// device. Every rank's combine buffer must be written by work before it on its stream. By expert
  /// the plan is that of the last call that sent rows, since what lies by expert is that call's.
  void combine(const plan& by, void* out, const void* bias, native_stream stream);

  /// The gradient of combine(): sends `sums.x`, the gradients of its sums (bf16, whatever
  /// `rows` is; no scales), to where the summed rows came from, into the combine buffers. `x` of
  /// what it returns is that buffer. By expert they come there times the weights, and with
  /// `outputs`, what lay in the combine buffer in combine() (kept by the user), the gradients of
  /// the weights are made too.
  received combine_backward(const tokens& sums, const plan& by, const void* outputs,
                            native_stream stream);
  /// f32 [capacity][top_k]: where, by source, the user writes the gradients of received::weights.
  float* weight_gradients() const;
  /// The gradient of dispatch: sums what is in the combine buffers, the gradients of the received
  /// rows, into `x` (bf16 [tokens][hidden]), without weights. With `weights` (f32
  /// [tokens][top_k]) not null, the gradients of the weights come back as well, those of
  /// `topk_ids`; 0 where nobody was chosen. By expert, and with weights across nodes, by the plan
  /// of the last call that sent rows, as combine().
  void dispatch_backward(const plan& by, void* x, const std::int64_t* topk_ids, float* weights,
                         native_stream stream);

  /// Blocks until the counts of the last dispatch are known, which is before its rows have arrived.
  /// Waits for none that was captured.
  row_counts counts();
  /// Collective: lets `device_rows` (and device_expert_rows) follow what was received: as many as
  /// the most that any rank received in one dispatch since the last call, times `headroom`,
  /// moving whole segments of the buffers between the tiers; nothing where all lies on the device.
  /// Contents and addresses stay. Waits first for the streams of its calls since it last did, which
  /// live until then, and for `in_use`: name there what replays graphs of its calls, and other
  /// streams that use its buffers. Returns device_rows as they are then, which options() tells too.
  /// Throws, on all ranks alike, invalid_argument for a headroom below 1, above 1,000 or not equal
  /// on all ranks, and what symmetric_heap::migrate throws; what was received then counts for the
  /// next call still.
  std::size_t adapt(double headroom = 1.25, const uses& in_use = {});
  /// Throws peer_error naming the ranks for which a kernel has waited in vain so far; across nodes
  /// what the channel's check() throws; and once, invalid_argument when a token chose an expert
  /// that there is not.
  void check();

  /// As given, but for device_rows and device_expert_rows, which are what there is: segments are
  /// rounded up.
  const exchange_options& options() const noexcept;
  /// Most rows that a rank can receive, by source and by expert.
  std::size_t capacity() const noexcept;
  std::size_t expert_capacity() const noexcept;

 private:
  struct state;
  std::unique_ptr<state> state_;
};

}  // namespace ep
}  // namespace evmm
