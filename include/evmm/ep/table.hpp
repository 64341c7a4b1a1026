// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/comm/symmetric_heap.hpp>
#include <evmm/device/table_view.cuh>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace [[gnu::visibility("default")]] evmm {
namespace ep {

/// What a table is made from; equal on all ranks, but for `check_indices`.
struct table_options {
  /// Rows of all ranks together, fewer than 2^32 when rounded up to a multiple of their number:
  /// rank r holds the rows [r, r + 1) x rows / ranks, rounded up.
  std::size_t rows = 0;
  /// Bytes of a row: 128 to 16,384, a multiple of 16.
  std::size_t row_bytes = 0;
  /// Where the rows lie. With device_first and host_first a rank's rows may lie in both tiers.
  tier_policy tiers = tier_policy::host_only;
  /// With device_first: so many rows of each rank, the first ones, lie in DEVICE memory, the others
  /// in HOST_NUMA memory, in new segments of their own, as an exchange's. 0: as the heap has room.
  std::size_t device_rows = 0;
  /// Rows that each rank keeps copies of in its own DEVICE memory, rounded up to a multiple of 8;
  /// 0: none. What was gathered last stays.
  std::size_t cache_rows = 0;
  /// Most indices that are ordered together, up to 2^30; a gather of more is done in parts. Takes
  /// about 20 bytes of DEVICE memory each.
  std::size_t max_batch = std::size_t{1} << 20;
  /// For debugging: each gather waits for its own work, and throws for an index that there is not
  /// instead of leaving that to check(). Not inside a graph capture, where nothing can be waited
  /// for.
  bool check_indices = false;
};

/// In which order the rows of a gather are loaded. What is stored is the same.
enum class gather_order : std::uint8_t {
  automatic,   ///< by address where that is faster, by a model of the host link
  by_address,  ///< always
  as_given,    ///< never: no work beside the copy
};

/// How one gather is done; local.
struct gather_options {
  gather_order order = gather_order::automatic;
  /// Multiprocessors that load rows. 0: 16 where rows lie in host memory, which saturate the link,
  /// else all.
  int sms = 0;
};

/// Counts of this rank since the table was made.
struct table_statistics {
  std::uint64_t gathered = 0;  ///< indices
  std::uint64_t hits = 0;      ///< indices whose rows came from the device cache
  /// Rows loaded from the table. Indices that were neither hits nor fetched were duplicates.
  std::uint64_t fetched = 0;
  /// Hits of all indices; 0 when there were none.
  double hit_rate() const noexcept {
    return gathered == 0 ? 0 : static_cast<double>(hits) / static_cast<double>(gathered);
  }
};

/// A gather that was issued. May not outlive the table's heap.
class pending_gather {
 public:
  pending_gather(pending_gather&&) noexcept;
  pending_gather& operator=(pending_gather&&) noexcept;
  /// Waits for nothing: the gather goes on.
  ~pending_gather();

  /// Later work of `stream` comes after the gather; does not block. Any number of streams may wait.
  void wait(native_stream stream) const;
  /// Whether the rows are there.
  bool done() const;

 private:
  friend class table;
  struct state;
  explicit pending_gather(std::unique_ptr<state> made);
  std::unique_ptr<state> state_;
};

/// A read-mostly table of rows of fixed size, sharded over the ranks of a node and larger than the
/// memory of their GPUs: rows lie in a symmetric heap, by default in its host tier, and every rank
/// loads rows of all ranks directly.
///
/// Memory: rows at stable addresses; scratch and cache on the device, taken once. Loads at random
///   over more host memory than the GPU's translation caches reach are limited by them, to a sixth
///   of the link for rows of 256 bytes; so large gathers are ordered on the GPU by address, and a
///   row that is wanted several times within 32 neighbours of that order is loaded once.
/// Threads: one at a time. Construction and destruction are collective; all other calls are this
///   rank's alone, whatever the others do.
/// Streams: work is enqueued and nothing waits on the CPU but what says so. Gathers of one rank
///   share scratch memory: each comes after the one before it, on whatever stream. Gathers and
///   scatter() may be captured into a graph (with CUDA's lazy loading, after a first one outside);
///   the program orders a graph's launch with other gathers. A change of the heap that moves rows
///   takes the streams of gathers in its `uses`. Between ranks the program orders: a row may be
///   written when no gather of it is under way anywhere, and is seen by gathers that come after the
///   write's stream was waited for (symmetric_channel::barrier, NCCL, or a synchronized stream and
///   bootstrap::barrier).
/// Errors: invalid_argument at the call, with nothing enqueued, for what the CPU can see. An index
///   that there is not touches no memory, and check() says so.
class table {
 public:
  /// Collective: takes its memory from the heap, which must outlive it; contents are undefined.
  /// Throws invalid_argument for options that cannot be or that differ, unsupported when ranks are
  /// on several nodes, out_of_memory.
  table(symmetric_heap& heap, const table_options& options);
  /// Waits for this rank's gathers and writes. Those of peers must be over.
  ~table();
  table(const table&) = delete;
  table& operator=(const table&) = delete;

  /// Copies row indices[i] to row i of `out`: indices and `out` ([indices.size()][row_bytes],
  /// aligned to 16) in memory that this rank's device reaches. -1 asks for nothing: its row of
  /// `out` is left as it is.
  void gather(std::span<const std::int64_t> indices, void* out, native_stream stream,
              const gather_options& how = {});
  /// The same on a stream of the table's own, after the work of `after` so far: other work of
  /// `after` runs beside it until someone waits. Indices and `out` must stay until then.
  [[nodiscard]] pending_gather issue_gather(std::span<const std::int64_t> indices, void* out,
                                            native_stream after, const gather_options& how = {});

  /// Writes whole rows from `first` on, by copies in stream order; `rows` in any memory, also the
  /// host's, where they stay until the stream is past it. No copy of them stays in any rank's
  /// cache.
  void write(std::size_t first, std::span<const std::byte> rows, native_stream stream);
  /// Writes row i of `rows` ([indices.size()][row_bytes], aligned to 16) to row indices[i], both in
  /// memory that this rank's device reaches. Which of several writes to one row stays is not said.
  void scatter(std::span<const std::int64_t> indices, const void* rows, native_stream stream);
  /// Drops this rank's cached copies of rows [first, first + count), for programs that write
  /// through view().
  void invalidate(std::size_t first, std::size_t count, native_stream stream);

  /// Blocks until the work of `stream` so far is done.
  table_statistics statistics(native_stream stream);
  /// Blocks until the work of `stream` so far is done. Throws invalid_argument naming one of the
  /// indices that there are not, if this rank asked for any, once.
  void check(native_stream stream);

  /// For kernels of the program's own.
  const table_view& view() const noexcept;
  const table_options& options() const noexcept;
  /// Bytes of all rows that lie in host memory now.
  std::size_t host_bytes() const;
  /// Whether a gather of so many indices is ordered by address.
  bool orders(std::size_t indices, const gather_options& how = {}) const;

 private:
  struct state;
  std::unique_ptr<state> state_;
};

}  // namespace ep
}  // namespace evmm
