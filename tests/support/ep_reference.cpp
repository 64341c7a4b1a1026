// SPDX-License-Identifier: Apache-2.0
#include "tests/support/ep_reference.hpp"

#include "comm/ep/bf16.hpp"

#include <random>

namespace evmm::test {

namespace {

std::mt19937_64 numbers(const ep_script& script, int what, std::uint64_t which) {
  return std::mt19937_64(script.seed * 1'000'003 + static_cast<std::uint64_t>(what) * 7919 + which);
}

/// A bf16 number of moderate size.
std::uint16_t small_number(std::uint64_t bits) {
  return ep::to_bf16(static_cast<float>(static_cast<int>(bits % 4001) - 2000) / 512.0f).bits;
}

}  // namespace

std::size_t ep_script::row_bytes() const {
  return options.hidden * (options.rows == ep::payload::bf16 ? 2 : 1);
}

std::vector<std::byte> ep_script::rows(int rank) const {
  auto next = numbers(*this, 1, static_cast<std::uint64_t>(rank));
  std::vector<std::byte> all(counts[static_cast<std::size_t>(rank)] * row_bytes());
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::byte>(next() >> 11);
  return all;
}

std::vector<float> ep_script::scales(int rank) const {
  auto next = numbers(*this, 2, static_cast<std::uint64_t>(rank));
  std::vector<float> all(counts[static_cast<std::size_t>(rank)] * scale_count());
  for (float& one : all) one = static_cast<float>(next() % 1000);
  return all;
}

std::vector<std::int64_t> ep_script::ids(int rank) const {
  auto next = numbers(*this, 3, static_cast<std::uint64_t>(rank));
  const auto experts = static_cast<std::uint64_t>(options.experts);
  std::vector<std::int64_t> all;
  for (std::size_t t = 0; t < counts[static_cast<std::size_t>(rank)]; ++t) {
    for (int k = 0; k < options.top_k; ++k) {
      const bool to_hot = hot > 0 && next() % 4 != 0;
      const auto id =
          static_cast<std::int64_t>(next() % (to_hot ? static_cast<std::uint64_t>(hot) : experts));
      const bool nobody = masked > 0 && next() % static_cast<std::uint64_t>(masked) == 0;
      all.push_back(nobody ? -1 : id);
    }
  }
  return all;
}

std::vector<float> ep_script::weights(int rank) const {
  auto next = numbers(*this, 4, static_cast<std::uint64_t>(rank));
  std::vector<float> all(counts[static_cast<std::size_t>(rank)] *
                         static_cast<std::size_t>(options.top_k));
  for (float& one : all) one = static_cast<float>(next() % 1024 + 1) / 1024.0f;
  return all;
}

std::vector<std::uint16_t> ep_script::made(int rank, std::size_t row) const {
  auto next = numbers(*this, 5 + rank, row * 31);
  std::vector<std::uint16_t> all(options.hidden);
  for (std::uint16_t& one : all) one = small_number(next() >> 7);
  return all;
}

std::vector<ep_row> rows_received(const ep_script& script, int rank) {
  const int local = script.options.experts / script.ranks;
  const auto top_k = static_cast<std::size_t>(script.options.top_k);
  std::vector<ep_row> rows;
  for (int source = 0; source < script.ranks; ++source) {
    const auto ids = script.ids(source);
    for (std::size_t t = 0; t * top_k < ids.size(); ++t) {
      bool comes = false;
      for (std::size_t k = 0; k < top_k; ++k) {
        const std::int64_t id = ids[t * top_k + k];
        comes = comes || (id >= 0 && id / local == rank);
      }
      if (comes) rows.push_back({source, t});
    }
  }
  return rows;
}

std::vector<std::uint16_t> combined(const ep_script& script, int rank,
                                    const std::vector<std::uint16_t>& bias) {
  const std::size_t hidden = script.options.hidden;
  std::vector<float> sums(script.counts[static_cast<std::size_t>(rank)] * hidden);
  for (std::size_t i = 0; i < sums.size() && !bias.empty(); ++i) {
    sums[i] = ep::to_float({bias[i]});
  }
  for (int at = 0; at < script.ranks; ++at) {
    const auto rows = rows_received(script, at);
    for (std::size_t row = 0; row < rows.size(); ++row) {
      if (rows[row].source != rank) continue;
      const auto made = script.made(at, row);
      for (std::size_t i = 0; i < hidden; ++i) {
        sums[rows[row].token * hidden + i] += ep::to_float({made[i]});
      }
    }
  }
  std::vector<std::uint16_t> all;
  all.reserve(sums.size());
  for (const float sum : sums) all.push_back(ep::to_bf16(sum).bits);
  return all;
}

}  // namespace evmm::test
