// SPDX-License-Identifier: Apache-2.0
// A mixture-of-experts exchange: tokens go to the ranks of their experts by stores into the peers'
// parts of a symmetric region, and their results come back by loads. The receive buffer holds the
// worst case, which the device need not: see README.md.
#include "exchange.hpp"
#include "options.hpp"
#include "picture.hpp"
#include "report.hpp"
#include "routing.hpp"

#include <evmm/comm/bootstrap.hpp>
#include <evmm/error.hpp>

#include <fmt/format.h>

#include <cstdio>
#include <fstream>

namespace {

moe::routing get_routing(const moe::options& wanted, int ranks) {
  if (!wanted.routing_file.empty()) {
    return moe::read_routing(wanted.routing_file, wanted.experts);
  }
  const std::size_t each = wanted.tokens != 0 ? wanted.tokens : 256;
  return moe::generate_routing(
      {.experts = wanted.experts != 0 ? wanted.experts : 64,
       .top_k = wanted.top_k,
       .tokens = each * static_cast<std::size_t>(ranks) * static_cast<std::size_t>(wanted.steps),
       .skew = wanted.skew,
       .seed = wanted.seed});
}

void write_file(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  if (!file.flush()) throw evmm::driver_error(fmt::format("cannot write '{}'", path));
}

int run(const std::shared_ptr<evmm::bootstrap>& ranks, const moe::options& wanted) {
  const auto trace = get_routing(wanted, ranks->size());
  moe::exchange exchange(ranks, evmm::default_driver(), wanted, trace);
  for (int s = 0; s < wanted.steps; ++s) {
    exchange.step(s);
    if (s + 1 < wanted.steps) exchange.change_after(s);
  }
  exchange.close();

  const auto& record = exchange.record();
  if (ranks->rank().value == 0) {
    fmt::print("{}", moe::report(record));
    if (!wanted.json.empty()) write_file(wanted.json, moe::to_json(record));
    if (!wanted.picture.empty()) {
      write_file(wanted.picture, moe::draw(record));
      fmt::print("picture: {}\n", wanted.picture);
    }
    fmt::print("{}\n", moe::verdict(record));
  }
  return record.mismatches() == 0 ? 0 : 1;
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
