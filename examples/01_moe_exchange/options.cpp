// SPDX-License-Identifier: Apache-2.0
#include "options.hpp"

#include <CLI/CLI.hpp>

#include <sstream>

namespace moe {

std::optional<early_exit> parse_options(int argc, const char* const* argv, options& into) {
  CLI::App app(
      "A mixture-of-experts exchange over the ranks of one node, in a receive buffer that is "
      "larger than the device. Run it under mpirun.");
  app.get_formatter()->column_width(32);

  auto* file = app.add_option("--routing", into.routing_file,
                              "Routing file, plain or gzipped: `id id ...,weight weight ...`, "
                              "one token a line, # for comments")
                   ->check(CLI::ExistingFile);
  auto* skew = app.add_option("--skew", into.skew,
                              "Generate a routing: expert i is wanted with weight 1/(i+1)^SKEW")
                   ->check(CLI::Range(0.0, 10.0))
                   ->capture_default_str();
  auto* top_k = app.add_option("--top-k", into.top_k, "Experts a token, when generating")
                    ->check(CLI::Range(1, 64))
                    ->capture_default_str();
  skew->excludes(file);
  top_k->excludes(file);
  app.add_option("--experts", into.experts,
                 "Experts in all; 0: as the file names, or 64 when generating")
      ->check(CLI::Range(0, 65536))
      ->capture_default_str();
  app.add_option("--steps", into.steps, "Steps; each takes the next tokens of the routing")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  app.add_option("--tokens", into.tokens,
                 "Tokens of each rank in each step, starting again at the routing's end; 0: deal "
                 "the routing out once, evenly")
      ->check(CLI::Range(std::size_t{0}, std::size_t{1} << 24))
      ->capture_default_str();
  app.add_option("--hidden", into.hidden, "Elements (bf16) of a token; a multiple of 8")
      ->check(CLI::Range(8, 1 << 20))
      ->capture_default_str();
  app.add_option("--repeat", into.repeat,
                 "Dispatch and combine so many times back to back and report the mean: for "
                 "timing on GPUs")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  app.add_option("--device-cap", into.device_cap,
                 "Most DEVICE memory in a rank's part of the region (64M, 2G); what is beyond "
                 "lies in HOST_NUMA")
      ->transform(CLI::AsSizeValue(false));
  app.add_option("--seed", into.seed, "Seed of tokens and of a generated routing")
      ->capture_default_str();
  app.add_option("--picture", into.picture, "SVG of the region and of the traffic; '' for none")
      ->capture_default_str();
  app.add_option("--json", into.json, "Write the run's numbers there");

  try {
    app.parse(argc, argv);
    if (into.hidden % 8 != 0) throw CLI::ValidationError("--hidden", "must be a multiple of 8");
  } catch (const CLI::ParseError& stop) {
    std::ostringstream out;
    if (app.exit(stop, out, out) == 0) return early_exit{out.str(), 0};  // --help
    return early_exit{"FAILED: " + out.str(), 1};
  }
  return std::nullopt;
}

}  // namespace moe
