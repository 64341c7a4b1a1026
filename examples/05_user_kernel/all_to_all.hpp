// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the kernel and the host function share: plain structs, and where everything lies.
//
// Every rank has tokens; each token's row goes to one rank. A rank stores its rows straight into
// the receive buffer of their destination, in a part of its own, at the next free slot; then it
// tells each destination how many there are, in one flag. Nobody asks for anything, and no counts
// are exchanged beforehand.
//
// There are two receive buffers and two sets of flags, which rounds take in turn. So a rank need
// not wait until its peers have read round n before it stores round n + 1; and before it stores
// round n + 2 it has seen their flags of round n + 1, which they set after they had read round n.

#include <evmm/device/symmetric_view.cuh>

#include <cstddef>
#include <cstdint>

struct CUstream_st;

/// This rank's counters, in memory of its own device.
struct counters {
  unsigned sent[evmm::symmetric_view::max_ranks];  ///< rows stored at each destination
  unsigned blocks_done;
  unsigned received;  ///< rows, from all sources
  unsigned wrong;     ///< of them
  unsigned late;      ///< sources whose flag did not come
};

/// One round. Offsets are from a rank's part of the region, the same on every rank.
struct all_to_all {
  std::uint64_t flags = 0;     ///< u64 [2][ranks]: round << 32 | rows, by source
  std::uint64_t counts = 0;    ///< counters; only the rank itself uses them
  std::uint64_t seen = 0;      ///< u32 [ranks][tokens]: the last round in which a row came
  std::uint64_t x = 0;         ///< u64 [tokens][words]: what is sent
  std::uint64_t rows[2] = {};  ///< u64 [ranks][tokens][words] each: what is received
  std::uint32_t tokens = 0;    ///< of each rank
  std::uint32_t words = 0;     ///< of a row, even
  std::uint64_t round = 0;     ///< from 1
  std::uint64_t max_spins = 0;

  /// The flag of `source`.
  EVMM_HOST_DEVICE std::uint64_t flag(const evmm::symmetric_view& view, int source) const {
    return flags + ((round % 2) * static_cast<std::uint64_t>(view.ranks) +
                    static_cast<std::uint64_t>(source)) *
                       sizeof(std::uint64_t);
  }
  /// A row of the receive buffer.
  EVMM_HOST_DEVICE std::uint64_t row(int source, std::uint32_t slot) const {
    return rows[round % 2] +
           (static_cast<std::uint64_t>(source) * tokens + slot) * words * sizeof(std::uint64_t);
  }
  EVMM_HOST_DEVICE std::uint64_t own_row(std::uint32_t token) const {
    return x + static_cast<std::uint64_t>(token) * words * sizeof(std::uint64_t);
  }
  /// A row's first word: which one it is.
  EVMM_HOST_DEVICE std::uint64_t head(std::uint32_t token) const { return round << 32 | token; }
};

EVMM_HOST_DEVICE std::uint64_t scramble(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}
/// Where a token's row goes: another rank in each round.
EVMM_HOST_DEVICE int destination(std::uint64_t round, int source, std::uint32_t token, int ranks) {
  const std::uint64_t all = (round << 48) ^ (static_cast<std::uint64_t>(source) << 32) ^ token;
  return static_cast<int>(scramble(all + 1) % static_cast<std::uint64_t>(ranks));
}
/// A word of a row behind the first.
EVMM_HOST_DEVICE std::uint64_t word_of(int source, std::uint32_t token, std::uint32_t index) {
  return scramble((static_cast<std::uint64_t>(source) << 48) + (std::uint64_t{token} << 16) +
                  index);
}

/// Enqueues a round on a stream of `device`: kernel.cu. Returns null, or what CUDA said.
const char* enqueue_kernels(const evmm::symmetric_view& view, const all_to_all& job, int device,
                            CUstream_st* stream);
/// The same on the calling thread: host_function.cpp.
void run_on_host(const evmm::symmetric_view& view, const all_to_all& job);
