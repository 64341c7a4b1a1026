// SPDX-License-Identifier: Apache-2.0
// A mixture-of-experts layer, forward and backward, whose experts are spread over the ranks. The
// exchange's buffers hold the worst case; what a skewed step needs beyond the device lies in host
// memory, and between steps the device part follows the load. Each step is compared with a dense
// reference that knows nothing of ranks. moe_layer.cpp is what to read first.
#include "check.hpp"
#include "moe_layer.hpp"
#include "options.hpp"
#include "reference.hpp"

#include <evmm/comm/bootstrap.hpp>
#include <evmm/comm/symmetric_heap.hpp>
#include <evmm/error.hpp>
#include <evmm/units.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <thread>

using namespace evmm::units;

namespace {

using ranks_pointer = std::shared_ptr<evmm::bootstrap>;

/// Addresses for twice what the exchange's buffers can hold: addresses cost nothing.
std::size_t bytes_to_reserve(const moe::layer_shape& shape, int ranks) {
  const std::size_t rows = static_cast<std::size_t>(ranks) * shape.tokens;
  const std::size_t row_bytes = 2 * shape.hidden * sizeof(moe::bf16);  // in and out
  return 1_GiB + 2 * rows * (1 + shape.top_k) * (row_bytes + 64);
}

template <class T>
std::vector<std::vector<T>> gather(evmm::bootstrap& ranks, const std::vector<T>& mine) {
  std::vector<std::vector<T>> all;
  for (const auto& bytes : ranks.all_gather(std::as_bytes(std::span(mine)), "routing")) {
    std::memcpy(all.emplace_back(bytes.size() / sizeof(T)).data(), bytes.data(), bytes.size());
  }
  return all;
}

/// What a rank says of a step.
struct rank_report {
  moe::layer_load load;
  moe::errors errors{};
};

class training {
 public:
  training(const ranks_pointer& ranks, const moe::options& wanted, moe::device_memory& memory,
           evmm::symmetric_heap& heap)
      : ranks_(*ranks),
        wanted_(wanted),
        data_(wanted.shape, wanted.seed, wanted.skew),
        reference_(wanted.shape, data_,
                   std::max(1u, std::thread::hardware_concurrency() /
                                    static_cast<unsigned>(ranks->size()))),
        math_(moe::make_math(memory)),
        layer_(heap, memory, *math_, {.shape = wanted.shape, .device_share = wanted.device_share}),
        x_(memory, wanted.shape.tokens * wanted.shape.hidden),
        y_(memory, x_.size()),
        of_y_(memory, x_.size()),
        of_x_(memory, x_.size()) {
    layer_.set_parameters(data_);
  }

  std::string math() const { return math_->name(); }
  void adapt() { layer_.adapt(); }
  std::size_t device_expert_rows() const { return layer_.device_expert_rows(); }

  /// The reports of all ranks.
  std::vector<rank_report> step(int index) {
    const int me = ranks_.rank().value;
    const std::vector<float> bias = data_.router_bias(index);
    layer_.set_router_bias(bias);
    x_.assign(data_.tokens(me, index));
    of_y_.assign(data_.output_gradients(me, index));
    layer_.forward(x_.data(), y_.data());
    layer_.backward(of_y_.data(), of_x_.data());
    // Here an optimizer would change the parameters; as they are, the reference can draw them.

    const auto ids = gather(ranks_, layer_.ids().read());
    const auto weights = gather(ranks_, layer_.weights().read());
    layer_.check();
    std::vector<moe::routed_tokens> all;
    for (int r = 0; r < ranks_.size(); ++r) {
      const auto at = static_cast<std::size_t>(r);
      all.push_back(
          {data_.tokens(r, index), data_.output_gradients(r, index), ids[at], weights[at]});
    }
    rank_report mine{.load = layer_.load()};
    const moe::routed_tokens& own = all[static_cast<std::size_t>(me)];
    const double routing = moe::routing_error(wanted_.shape, reference_.logits(own.x, bias), own);
    mine.errors[moe::routing_weight] = routing;
    // Choices that cannot be have no reference.
    const auto all_routings = ranks_.all_gather_value(routing, "routing errors");
    if (std::all_of(all_routings.begin(), all_routings.end(), [](double error) {
          return error <= moe::k_tolerated[moe::routing_weight].error;
        })) {
      moe::compare(layer_, wanted_.shape, reference_, all, me, y_.read(), of_x_.read(),
                   mine.errors);
    }
    return ranks_.all_gather_value(mine, "errors");
  }

 private:
  evmm::bootstrap& ranks_;
  moe::options wanted_;
  moe::data_set data_;
  moe::dense_reference reference_;
  std::unique_ptr<moe::layer_math> math_;
  moe::moe_layer layer_;
  moe::device_array<moe::bf16> x_, y_, of_y_, of_x_;
};

/// Adds the reports of a step up. Says what is wrong; empty when nothing is.
std::string judge(const std::vector<rank_report>& step, rank_report& sum) {
  std::string wrong;
  for (std::size_t r = 0; r < step.size(); ++r) {
    sum.load.rows += step[r].load.rows;
    sum.load.expert_rows += step[r].load.expert_rows;
    sum.load.on_host += step[r].load.on_host;
    for (std::size_t q = 0; q < moe::quantities; ++q) {
      sum.errors[q] = std::max(sum.errors[q], step[r].errors[q]);
      const auto& [name, tolerated] = moe::k_tolerated[q];
      if (step[r].errors[q] <= tolerated) continue;
      wrong += fmt::format("FAILED: rank {}: {}: error {:.2g}, tolerated {:.2g}\n", r, name,
                           step[r].errors[q], tolerated);
    }
  }
  return wrong;
}

std::string verdict(const rank_report& sum, int ranks, const moe::options& wanted,
                    const std::string& math) {
  std::string text = "largest errors";
  for (std::size_t q = 0; q < moe::quantities; ++q) {
    text +=
        fmt::format("{} {} {:.2g}", q == 0 ? ":" : ",", moe::k_tolerated[q].name, sum.errors[q]);
  }
  return text + fmt::format(
                    "\nverified: {} ranks, {} steps, {} tokens, {} rows by expert, {} rows spilled "
                    "to HOST_NUMA, {}, largest error {:.2g} of {:.2g}\n",
                    ranks, wanted.steps,
                    static_cast<std::size_t>(ranks * wanted.steps) * wanted.shape.tokens,
                    sum.load.expert_rows, sum.load.on_host, math,
                    *std::max_element(sum.errors.begin(), sum.errors.end()), moe::k_bf16);
}

int run(const ranks_pointer& ranks, moe::options wanted) {
  const bool first = ranks->rank() == evmm::rank_id{0};
  const auto driver = evmm::default_driver();
  wanted.choose_sizes(driver->info().kind == evmm::driver_kind::cuda, ranks->size());
  moe::check_sizes(wanted.shape, ranks->size());
  const evmm::device_id device{ranks->node_rank() % driver->device_count()};

  moe::device_memory memory(driver, device);
  const evmm::uses in_use{.streams = {&memory.stream, 1}};
  evmm::symmetric_region region(ranks, driver,
                                {.device = device,
                                 .reserve = bytes_to_reserve(wanted.shape, ranks->size()),
                                 .max_segments = 64});
  evmm::symmetric_heap heap(std::move(region));
  std::string wrong;
  {
    training run(ranks, wanted, memory, heap);
    rank_report sum;
    for (int step = 0; step < wanted.steps && wrong.empty(); ++step) {
      const std::size_t on_device = run.device_expert_rows();
      const auto reports = run.step(step);
      wrong = judge(reports, sum);
      if (first) {
        const auto [least, most] = std::minmax_element(
            reports.begin(), reports.end(), [](const rank_report& a, const rank_report& b) {
              return a.load.expert_rows < b.load.expert_rows;
            });
        fmt::print(
            "step {}: {} to {} rows by expert on a rank, room for {} on the device; the "
            "busiest has {} in HOST_NUMA\n",
            step, least->load.expert_rows, most->load.expert_rows, on_device, most->load.on_host);
      }
      if (step + 1 < wanted.steps) run.adapt();
    }
    if (first) {
      // Before the ranks part: when one returns 1, mpirun ends the others.
      fmt::print("{}", wrong.empty() ? verdict(sum, ranks->size(), wanted, run.math()) : wrong);
      std::fflush(stdout);
    }
  }
  heap.close(in_use);
  return wrong.empty() ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  int rank = 0;
  try {
    const auto ranks = evmm::make_mpi_bootstrap();
    rank = ranks->rank().value;
    moe::options wanted;
    if (const auto stop = moe::parse_options(argc, argv, wanted)) {
      if (rank == 0) std::fputs(stop->text.c_str(), stdout);
      return stop->code;
    }
    return run(ranks, wanted);
  } catch (const std::exception& failure) {
    // Rank 0 speaks for the job; the others say what they know beside it.
    fmt::print(rank == 0 ? stdout : stderr, "FAILED: rank {}: {}\n", rank, failure.what());
    return 1;
  }
}
