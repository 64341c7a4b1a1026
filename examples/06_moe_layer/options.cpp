// SPDX-License-Identifier: Apache-2.0
#include "options.hpp"

#include <evmm/error.hpp>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <sstream>

namespace moe {

std::optional<early_exit> parse_options(int argc, const char* const* argv, options& into) {
  CLI::App app(
      "A mixture-of-experts layer, forward and backward, whose experts are spread over the ranks "
      "of one node; checked against a dense reference. Run it under mpirun.");
  app.get_formatter()->column_width(32);

  app.add_option("--tokens", into.shape.tokens,
                 "Tokens of each rank in each step; 0: 1024 on a GPU, 512 without one")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  app.add_option("--hidden", into.shape.hidden,
                 "Elements of a token, a multiple of 128; 0: 1024 on a GPU, 768 without one")
      ->check(CLI::Range(0, 32768))
      ->capture_default_str();
  app.add_option("--intermediate", into.shape.intermediate,
                 "Elements between an expert's projections, a multiple of 8; 0: 512 on a GPU, 32 "
                 "without one")
      ->check(CLI::Range(0, 1 << 18))
      ->capture_default_str();
  app.add_option("--experts", into.shape.experts,
                 "Experts in all, a multiple of the number of ranks; 0: 8 a rank")
      ->check(CLI::Range(0, 16384))
      ->capture_default_str();
  app.add_option("--top-k", into.shape.top_k, "Experts a token")
      ->check(CLI::Range(1, 32))
      ->capture_default_str();
  app.add_option("--steps", into.steps, "Steps; the first is balanced")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  app.add_option("--skew", into.skew,
                 "After the first step the router prefers expert i by -SKEW x log(i + 1)")
      ->check(CLI::Range(0.0, 10.0))
      ->capture_default_str();
  app.add_option("--device-share", into.device_share,
                 "Of a balanced load, what lies in DEVICE memory at first; the rest lies in "
                 "HOST_NUMA")
      ->check(CLI::Range(0.0, 64.0))
      ->capture_default_str();
  app.add_option("--seed", into.seed, "Seed of parameters and tokens")->capture_default_str();

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& stop) {
    std::ostringstream out;
    if (app.exit(stop, out, out) == 0) return early_exit{out.str(), 0};  // --help
    return early_exit{"FAILED: " + out.str(), 1};
  }
  return std::nullopt;
}

void options::choose_sizes(bool on_gpu, int ranks) {
  const auto choose = [&](std::size_t& size, std::size_t gpu, std::size_t cpu) {
    if (size == 0) size = on_gpu ? gpu : cpu;
  };
  const auto a_rank = 8 * static_cast<std::size_t>(ranks);
  choose(shape.tokens, 1024, 512);
  choose(shape.hidden, 1024, 768);
  choose(shape.intermediate, 512, 32);
  choose(shape.experts, a_rank, a_rank);
}

void check_sizes(const layer_shape& shape, int ranks) {
  const auto refuse = [](const std::string& what, const std::string& help) {
    throw evmm::invalid_argument(what, help);
  };
  if (shape.hidden % 128 != 0) {
    refuse(fmt::format("--hidden is {}", shape.hidden), "give a multiple of 128");
  }
  if (shape.intermediate % 8 != 0) {
    // Rows of 16 bytes and more, as GEMMs load them.
    refuse(fmt::format("--intermediate is {}", shape.intermediate), "give a multiple of 8");
  }
  if (shape.experts % static_cast<std::size_t>(ranks) != 0) {
    refuse(fmt::format("--experts is {}, with {} ranks", shape.experts, ranks),
           "give a multiple of the number of ranks");
  }
  if (shape.top_k > shape.experts) {
    refuse(fmt::format("--top-k is {}, with {} experts", shape.top_k, shape.experts),
           "give at most the number of experts, or raise --experts");
  }
}

}  // namespace moe
