// SPDX-License-Identifier: Apache-2.0
#include "exchange_ops.hpp"

#include <evmm/error.hpp>

#include <array>
#include <cstring>
#include <utility>
#include <vector>

namespace moe {

namespace {

/// The same steps as the kernels, row by row, on the stream's worker thread.
class host_ops final : public exchange_ops {
 public:
  host_ops(std::shared_ptr<evmm::driver> on, const ops_options& options)
      : on_(std::move(on)), options_(options) {}

  void publish_counts(const exchange_step& step) override {
    enqueue([step] {
      const std::size_t bytes = static_cast<std::size_t>(step.experts) * sizeof(std::uint32_t);
      for (int r = 0; r < step.view.ranks; ++r) {
        const auto mine = static_cast<std::uint64_t>(step.view.rank) * bytes;
        std::memcpy(step.view.peer(r, step.layout.counts + mine), step.counts, bytes);
      }
    });
  }

  void dispatch(const exchange_step& step) override {
    enqueue([step] {
      const auto top_k = static_cast<std::size_t>(step.top_k);
      for (std::size_t t = 0; t < step.tokens; ++t) {
        const bf16* x = step.x + t * static_cast<std::size_t>(step.hidden);
        for (std::size_t k = 0; k < top_k; ++k) {
          std::memcpy(step.row(step.targets[t * top_k + k]), x, step.row_bytes());
        }
      }
    });
  }

  void apply_experts(const exchange_step& step) override {
    enqueue([step] {
      for (std::uint32_t row = 0; row < step.arrived; ++row) {
        const auto expert = stand_in_expert::of(step.expert_of(row));
        auto* values = reinterpret_cast<bf16*>(step.row({step.view.rank, row}));
        for (int c = 0; c < step.hidden; ++c) values[c] = expert(values[c]);
      }
    });
  }

  void combine(const exchange_step& step) override {
    enqueue([step] {
      const auto width = static_cast<std::size_t>(step.hidden);
      const auto top_k = static_cast<std::size_t>(step.top_k);
      std::vector<float> sum(width);
      for (std::size_t t = 0; t < step.tokens; ++t) {
        std::fill(sum.begin(), sum.end(), 0.0f);
        for (std::size_t k = 0; k < top_k; ++k) {
          const auto* row = reinterpret_cast<const bf16*>(step.row(step.targets[t * top_k + k]));
          const float weight = step.weights[t * top_k + k];
          for (std::size_t c = 0; c < width; ++c) sum[c] = accumulate(sum[c], weight, row[c]);
        }
        for (std::size_t c = 0; c < width; ++c) step.y[t * width + c] = to_bf16(sum[c]);
      }
    });
  }

  void barrier(const exchange_step& step, std::uint64_t round) override {
    enqueue([step, round, patience = options_.patience] {
      if (*step.timed_out != 0) return;
      // A few turns at a time, so that the clock is looked at. To signal again does no harm.
      constexpr std::uint64_t turns = 256;
      const auto deadline = std::chrono::steady_clock::now() + patience;
      while (!evmm::barrier(step.view, step.layout.flags, round, turns)) {
        if (std::chrono::steady_clock::now() >= deadline) {
          *step.timed_out = round;
          return;
        }
      }
    });
  }

 private:
  template <class Work>
  void enqueue(Work&& work) {
    on_->launch(options_.stream, std::forward<Work>(work));
  }

  std::shared_ptr<evmm::driver> on_;
  ops_options options_;
};

}  // namespace

region_layout region_layout::of(int ranks, int experts) {
  // Flags and counts on lines of their own; rows on a page, so that rows whose size divides the
  // granularity never straddle two segments.
  const auto align = [](std::uint64_t at, std::uint64_t to) { return (at + to - 1) / to * to; };
  region_layout made;
  const auto r = static_cast<std::uint64_t>(ranks);
  made.counts = align(made.flags + r * sizeof(std::uint64_t), 128);
  made.rows =
      align(made.counts + r * static_cast<std::uint64_t>(experts) * sizeof(std::uint32_t), 4096);
  return made;
}

std::unique_ptr<exchange_ops> make_host_ops(std::shared_ptr<evmm::driver> on,
                                            const ops_options& options) {
  return std::make_unique<host_ops>(std::move(on), options);
}

#if !defined(EVMM_EXAMPLE_CUDA)
std::unique_ptr<exchange_ops> make_cuda_ops(const ops_options&) {
  throw evmm::unsupported("the CUDA driver is in use, but this program has no kernels",
                          "configure with EVMM_CUDA=ON, or run with EVMM_DRIVER=host");
}
#endif

std::unique_ptr<exchange_ops> make_ops(std::shared_ptr<evmm::driver> on,
                                       const ops_options& options) {
  if (on->info().kind == evmm::driver_kind::cuda) return make_cuda_ops(options);
  return make_host_ops(std::move(on), options);
}

}  // namespace moe
