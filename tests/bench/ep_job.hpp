// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/bench/ep_kernels.hpp"
#include "tests/bench/ep_routing.hpp"
#include "tests/bench/job_support.hpp"

#include <evmm/comm/symmetric_buffer.hpp>
#include <evmm/ep/exchange.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace evmm::bench {

constexpr int k_ep_rounds = 30;
constexpr std::size_t k_hidden = 7168;

/// Which routing a case goes by: a file, or one that is generated for 256 experts, top-8.
struct routing_choice {
  std::string file = {};
  double skew = 0;  ///< expert i is wanted with weight 1 / (i + 1)^skew; 0 is uniform
  placement where = placement::in_order;
  /// "uniform", "zipf_1.0", or the file's name without its endings.
  std::string name() const;
};

/// How much of a receive buffer lies in DEVICE memory.
enum class device_part {
  all,     ///< the worst case
  spill,   ///< so that a given share of what comes lies in host memory
  average  ///< what the ranks receive on average: busier ones spill
};

struct ep_case {
  std::size_t tokens = 4096;  ///< of each rank
  ep::payload rows = ep::payload::bf16;
  int sms = 24;
  routing_choice routing = {};
  device_part sized = device_part::all;
  double spill = 0;
  bool quantize = false;
  ep::layout arranged = ep::layout::by_source;
};

/// Neighbouring rows of what is expected, and where they lie.
struct ep_block {
  std::size_t first = 0;  ///< among what is expected
  std::size_t rows = 0;
  std::size_t at = 0;  ///< row in memory
};

/// In which order a rank receives rows.
enum class row_order {
  by_rank,  ///< of their sources
  in_turn   ///< its own first, then those of the ranks after it: as ep::received
};

/// One rank's tensors, where all tokens go, and what must come of them: the reference that the
/// exchange and its peers are held to.
class ep_job {
 public:
  ep_job(const job& at, const ep_case& wanted, row_order order);
  ep_job(const ep_job&) = delete;
  ep_job& operator=(const ep_job&) = delete;

  const ep_case wanted;
  const ep_routing& routing;
  symmetric_heap heap;
  symmetric_buffer<std::uint64_t> flags;
  symmetric_buffer<std::byte> x;
  symmetric_buffer<float> scales;
  symmetric_buffer<std::int64_t> ids;
  symmetric_buffer<float> weights;
  symmetric_buffer<std::uint16_t> out;
  ep_probe probe;

  bool fp8() const { return wanted.rows == ep::payload::fp8; }
  /// Of a dispatched row, without its scales.
  std::size_t row_bytes() const { return k_hidden * (fp8() ? 1 : 2); }
  std::size_t scale_count() const { return fp8() ? k_hidden / 128 : 0; }
  /// What a row takes on the wire, dispatched or combined.
  std::size_t dispatched_bytes() const { return row_bytes() + scale_count() * sizeof(float); }
  static std::size_t combined_bytes() { return k_hidden * 2; }
  std::size_t device_rows() const;

  /// Of what lies at `got`, how many rows are not what the sources sent, in their order. Members
  /// that are null are not compared.
  std::size_t wrong_rows(const ep_rows& got);
  /// Writes what this rank's experts make of its rows.
  void fill_results(void* y);
  /// The same where rows of source s lie from row s x `stride`. By rank only.
  std::vector<ep_block> blocks_by_source(std::size_t stride) const;
  /// And where there is a row for each choice, grouped by expert: from the rows in `begin`.
  std::vector<ep_block> blocks_by_expert(const std::vector<std::size_t>& begin) const;
  std::size_t wrong_rows(const ep_rows& got, const std::vector<ep_block>& blocks);
  void fill_results(void* y, const std::vector<ep_block>& blocks);
  /// How many elements of `out` are not the sum of what the ranks have made.
  std::size_t wrong_sums();

  /// Runs `step` in each of the state's iterations with a cold L2 cache and all ranks there, and
  /// reports the median of the slowest rank's times with the bandwidths that belong to it.
  /// `then` runs behind each, untimed.
  void measure(benchmark::State& state, std::size_t bytes_a_row, const std::function<void()>& step,
               const std::function<void()>& then = {});

 private:
  bool by_expert() const { return wanted.arranged == ep::layout::by_expert; }
  ep_expected expected() const;
  ep_expected expected(const ep_block& block) const;

  const job at_;
  int rank_;
  symmetric_buffer<std::uint64_t> masks_;
  symmetric_buffer<std::int32_t> sources_, tokens_, experts_;
  symmetric_buffer<float> row_weights_;
  std::vector<std::size_t> expert_rows_;  ///< of each expert here
};

}  // namespace evmm::bench
