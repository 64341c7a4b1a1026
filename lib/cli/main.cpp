// SPDX-License-Identifier: Apache-2.0
#include "lib/cli/doctor.hpp"
#include "lib/cli/info.hpp"
#include "lib/cli/machine.hpp"

#include <evmm/version.hpp>

#include <CLI/CLI.hpp>

#include <cstdio>
#include <exception>
#include <string>

namespace {

template <class Report>
int print(const Report& report, bool json) {
  using evmm::cli::to_json;
  using evmm::cli::to_text;
  const std::string text = json ? to_json(report).dump(2) + "\n" : to_text(report);
  std::fputs(text.c_str(), stdout);
  return exit_code(report);
}

}  // namespace

int main(int count, char** words) {
  CLI::App app("Elastic GPU + host memory for communication: what is here, and what is in the way",
               "evmm");
  app.set_version_flag("--version", std::string("evmm ") + EVMM_VERSION);
  app.require_subcommand(1);
  bool json = false;
  CLI::App* const info = app.add_subcommand(
      "info", "versions, devices, NUMA nodes and placement, and what was proved by trying");
  CLI::App* const doctor = app.add_subcommand(
      "doctor",
      "what would stop or slow a job here, and the remedy; 1 when something would stop it");
  for (CLI::App* command : {info, doctor}) command->add_flag("--json", json, "print JSON");
  try {
    app.parse(count, words);
  } catch (const CLI::ParseError& failure) {
    return app.exit(failure) == 0 ? 0 : 2;
  }

  try {
    auto here = evmm::cli::look_at_machine();
    return info->parsed() ? print(evmm::cli::collect_info(here), json)
                          : print(evmm::cli::run_doctor(here), json);
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "evmm: %s\n", failure.what());
    return 1;
  }
}
