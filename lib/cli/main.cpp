// SPDX-License-Identifier: Apache-2.0
#include "lib/cli/doctor.hpp"
#include "lib/cli/info.hpp"
#include "lib/cli/machine.hpp"
#include "lib/cli/replay.hpp"

#include <evmm/error.hpp>
#include <evmm/version.hpp>

#include <CLI/CLI.hpp>

#include <cerrno>
#include <cstdio>
#include <exception>
#include <fstream>
#include <string>
#include <system_error>

namespace {

template <class Report>
void show(const Report& report, bool json) {
  using evmm::cli::to_json;
  using evmm::cli::to_text;
  const std::string text = json ? to_json(report).dump(2) + "\n" : to_text(report);
  if (std::fputs(text.c_str(), stdout) < 0 || std::fflush(stdout) != 0) {
    throw evmm::invalid_argument("standard output cannot be written: " +
                                 std::generic_category().message(errno));
  }
}

template <class Report>
int print(const Report& report, bool json) {
  show(report, json);
  return exit_code(report);
}

void write(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  if (!file) throw evmm::invalid_argument(path + ": cannot be written", "check --plot");
}

/// The options of `evmm replay`.
struct replay_command {
  evmm::cli::replay_options options;
  std::string backend;
  std::string plot;

  void add_to(CLI::App& command) {
    command.add_option("TRACE", options.traces, "recorded traces or pickled snapshots, also .gz")
        ->required();
    command.add_option("--driver", options.driver, "host or cuda; default: EVMM_DRIVER, the GPU")
        ->check(CLI::IsMember({"host", "cuda"}));
    command.add_option("--config", options.config,
                       "key:value,... on top of EVMM_ALLOC_CONF or PYTORCH_ALLOC_CONF");
    command.add_option("--backend", backend, "short for backend:NAME in --config")
        ->check(CLI::IsMember({"native", "cudaMallocAsync", "none"}));
    command.add_option("--passes", options.passes, "over each trace; the first finds no memory")
        ->check(CLI::Range(1, 1000000))
        ->capture_default_str();
    command.add_option("--plot", plot, "write allocated, active and reserved over time, as SVG");
  }

  int run(bool json) {
    if (!backend.empty()) {
      options.config += (options.config.empty() ? "backend:" : ",backend:") + backend;
    }
    options.curves = !plot.empty();
    const auto report = evmm::cli::replay(options);
    // First what was measured: a picture that cannot be written shall not lose it.
    show(report, json);
    if (!plot.empty()) write(plot, evmm::cli::draw(report.curves));
    return 0;
  }
};

}  // namespace

int main(int count, char** words) {
  CLI::App app("Elastic GPU + host memory for communication: what is here, and what is in the way",
               "evmm");
  app.set_version_flag("--version", std::string("evmm ") + EVMM_VERSION);
  app.require_subcommand(0, 1);  // none is refused below, so that a mistyped one is named
  bool json = false;
  CLI::App* const info = app.add_subcommand(
      "info", "versions, devices, NUMA nodes and placement, and what was proved by trying");
  CLI::App* const doctor = app.add_subcommand(
      "doctor",
      "what would stop or slow a job here, and the remedy; 1 when something would stop it");
  CLI::App* const replay = app.add_subcommand(
      "replay", "recorded allocations through the caching allocator: time, memory, driver calls");
  replay_command replaying;
  replaying.add_to(*replay);
  for (CLI::App* command : {info, doctor, replay}) command->add_flag("--json", json, "print JSON");
  try {
    app.parse(count, words);
    if (app.get_subcommands().empty()) throw CLI::RequiredError::Subcommand(1);
  } catch (const CLI::ParseError& failure) {
    return app.exit(failure) == 0 ? 0 : 2;
  }

  try {
    if (replay->parsed()) return replaying.run(json);
    auto here = evmm::cli::look_at_machine();
    return info->parsed() ? print(evmm::cli::collect_info(here), json)
                          : print(evmm::cli::run_doctor(here), json);
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "evmm: %s\n", failure.what());
    return 1;
  }
}
