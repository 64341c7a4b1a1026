// SPDX-License-Identifier: Apache-2.0
// The same round as a host function: the protocol without the parallelism, on evmm's host driver.
#include "all_to_all.hpp"

#include <algorithm>

namespace {

void push(const evmm::symmetric_view& view, const all_to_all& job) {
  auto* const counts = view.local<counters>(job.counts);
  for (std::uint32_t token = 0; token < job.tokens; ++token) {
    const int to = destination(job.round, view.rank, token, view.ranks);
    const auto* from = view.local<std::uint64_t>(job.own_row(token));
    auto* row = view.peer<std::uint64_t>(to, job.row(view.rank, counts->sent[to]++));
    std::copy_n(from, job.words, row);
    row[0] = job.head(token);
  }
  for (int to = 0; to < view.ranks; ++to) {
    evmm::signal(view.peer<std::uint64_t>(to, job.flag(view, view.rank)),
                 job.round << 32 | counts->sent[to]);
  }
}

bool is_right(const evmm::symmetric_view& view, const all_to_all& job, int source,
              std::uint32_t slot) {
  const auto* row = view.local<std::uint64_t>(job.row(source, slot));
  const auto token = static_cast<std::uint32_t>(row[0]);
  if (token >= job.tokens || row[0] != job.head(token) ||
      destination(job.round, source, token, view.ranks) != view.rank) {
    return false;
  }
  for (std::uint32_t i = 1; i < job.words; ++i) {
    if (row[i] != word_of(source, token, i)) return false;
  }
  auto* seen =
      view.local<std::uint32_t>(job.seen) + static_cast<std::size_t>(source) * job.tokens + token;
  const bool again = *seen == job.round;
  *seen = static_cast<std::uint32_t>(job.round);
  return !again;
}

void receive(const evmm::symmetric_view& view, const all_to_all& job) {
  auto* const counts = view.local<counters>(job.counts);
  for (int source = 0; source < view.ranks; ++source) {
    const auto* flag = view.local<std::uint64_t>(job.flag(view, source));
    if (!evmm::wait_signal(flag, job.round << 32, job.max_spins)) {
      ++counts->late;
      continue;
    }
    const auto rows = static_cast<std::uint32_t>(evmm::read_signal(flag));
    counts->received += rows;
    for (std::uint32_t slot = 0; slot < rows; ++slot) {
      if (!is_right(view, job, source, slot)) ++counts->wrong;
    }
  }
}

}  // namespace

void run_on_host(const evmm::symmetric_view& view, const all_to_all& job) {
  push(view, job);
  receive(view, job);
}
