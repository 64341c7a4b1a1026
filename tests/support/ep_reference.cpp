// SPDX-License-Identifier: Apache-2.0
#include "tests/support/ep_reference.hpp"

#include "comm/ep/bf16.hpp"
#include "comm/ep/fp8.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <stdexcept>

namespace evmm::test {

namespace {

std::mt19937_64 numbers(std::uint64_t seed, int what, std::uint64_t which) {
  return std::mt19937_64(seed * 1'000'003 + static_cast<std::uint64_t>(what) * 7919 + which);
}

/// A bf16 number of moderate size.
std::uint16_t small_number(std::uint64_t bits) {
  return ep::to_bf16(static_cast<float>(static_cast<int>(bits % 4001) - 2000) / 512.0f).bits;
}

/// Of a group of 128 elements.
float amax_of(const std::vector<std::byte>& rows, std::size_t group) {
  float amax = ep::k_least_amax;
  for (std::size_t i = group * 128; i < (group + 1) * 128; ++i) {
    ep::bf16 one;
    std::memcpy(&one, &rows[i * 2], sizeof(one));
    amax = std::max(amax, std::fabs(ep::to_float(one)));
  }
  return amax;
}

}  // namespace

std::size_t ep_script::row_bytes() const {
  return options.hidden * (options.rows == ep::payload::bf16 ? 2 : 1);
}

std::vector<std::byte> ep_script::given(int rank) const {
  auto next = numbers(seed, 1, static_cast<std::uint64_t>(rank));
  const std::size_t count = counts[static_cast<std::size_t>(rank)];
  if (!options.quantize) {
    std::vector<std::byte> all(count * row_bytes());
    for (std::byte& one : all) one = static_cast<std::byte>(next() >> 11);
    return all;
  }
  // Of all magnitudes, and here and there a group of zeros.
  std::vector<std::byte> all(count * options.hidden * 2);
  for (std::size_t i = 0; i < count * options.hidden; ++i) {
    const bool zero = i / 128 % 17 == 3;
    const auto size = std::ldexp(1.0f, static_cast<int>(i / 128 % 23) - 12);
    const auto value = static_cast<float>(static_cast<int>(next() % 20001) - 10000) * size / 999.0f;
    const ep::bf16 one = ep::to_bf16(zero ? 0 : value);
    std::memcpy(&all[i * 2], &one, sizeof(one));
  }
  return all;
}

std::vector<std::byte> ep_script::rows(int rank) const {
  const auto from = given(rank);
  if (!options.quantize) return from;
  const auto scale = scales(rank);
  std::vector<std::byte> all(from.size() / 2);
  for (std::size_t i = 0; i < all.size(); ++i) {
    ep::bf16 one;
    std::memcpy(&one, &from[i * 2], sizeof(one));
    // As the quantisation is defined: by the inverse of the scale, in FP32.
    const float amax = amax_of(from, i / 128);
    all[i] = static_cast<std::byte>(ep::to_fp8(ep::to_float(one) * (ep::k_fp8_most / amax)));
    // And near what it stands for: 3 bits of mantissa, and the least number of the group's scale.
    const float back = ep::from_fp8(static_cast<std::uint8_t>(all[i])) * scale[i / 128];
    const float error = std::fabs(back - ep::to_float(one));
    if (error > std::fabs(ep::to_float(one)) / 16 + scale[i / 128] / 512) {
      throw std::logic_error("quantised too far away");
    }
  }
  return all;
}

std::vector<float> ep_script::scales(int rank) const {
  auto next = numbers(seed, 2, static_cast<std::uint64_t>(rank));
  std::vector<float> all(counts[static_cast<std::size_t>(rank)] * scale_count());
  if (options.quantize) {
    const auto from = given(rank);
    for (std::size_t g = 0; g < all.size(); ++g) all[g] = amax_of(from, g) / ep::k_fp8_most;
    return all;
  }
  for (float& one : all) one = static_cast<float>(next() % 1000);
  return all;
}

std::vector<std::uint16_t> ep_script::gradients(int rank) const {
  auto next = numbers(seed, 6, static_cast<std::uint64_t>(rank));
  std::vector<std::uint16_t> all(counts[static_cast<std::size_t>(rank)] * options.hidden);
  for (std::uint16_t& one : all) one = small_number(next() >> 9);
  return all;
}

std::vector<std::int64_t> ep_script::ids(int rank) const {
  auto next = numbers(routing(), 3, static_cast<std::uint64_t>(rank));
  const auto experts = static_cast<std::uint64_t>(options.experts);
  std::vector<std::int64_t> all;
  for (std::size_t t = 0; t < counts[static_cast<std::size_t>(rank)]; ++t) {
    for (int k = 0; k < options.top_k; ++k) {
      const bool to_hot = hot > 0 && next() % 4 != 0;
      auto id =
          static_cast<std::int64_t>(next() % (to_hot ? static_cast<std::uint64_t>(hot) : experts));
      const auto begin = all.end() - k;
      while (distinct && k < options.experts && std::find(begin, all.end(), id) != all.end()) {
        id = (id + 1) % options.experts;
      }
      const bool nobody = masked > 0 && next() % static_cast<std::uint64_t>(masked) == 0;
      all.push_back(nobody ? -1 : id);
    }
  }
  return all;
}

std::vector<float> ep_script::weights(int rank) const {
  auto next = numbers(routing(), 4, static_cast<std::uint64_t>(rank));
  std::vector<float> all(counts[static_cast<std::size_t>(rank)] *
                         static_cast<std::size_t>(options.top_k));
  for (float& one : all) one = static_cast<float>(next() % 1024 + 1) / 1024.0f;
  return all;
}

std::vector<std::uint16_t> ep_script::made(int rank, std::size_t row) const {
  auto next = numbers(seed, 10 + rank, row * 31);
  std::vector<std::uint16_t> all(options.hidden);
  for (std::uint16_t& one : all) one = small_number(next() >> 7);
  return all;
}

namespace {

/// Whether a token has an expert for which `wanted(rank)` holds.
template <class Wanted>
bool goes(const ep_script& script, const std::vector<std::int64_t>& ids, std::size_t t,
          const Wanted& wanted) {
  const auto top_k = static_cast<std::size_t>(script.options.top_k);
  const int local = script.options.experts / script.ranks;
  return std::any_of(&ids[t * top_k], &ids[t * top_k] + top_k, [&](std::int64_t id) {
    return id >= 0 && wanted(static_cast<int>(id / local));
  });
}

}  // namespace

std::vector<int> ep_script::ranks_of(int node) const {
  std::vector<int> all;
  for (int r = 0; r < ranks; ++r) {
    if (node_of[static_cast<std::size_t>(r)] == node) all.push_back(r);
  }
  return all;
}

std::vector<ep_row> rows_received(const ep_script& script, int rank) {
  const int here = script.node_of[static_cast<std::size_t>(rank)];
  const int nodes = 1 + *std::max_element(script.node_of.begin(), script.node_of.end());
  const auto mates = script.ranks_of(here);
  std::vector<ep_row> rows;
  const auto own =
      static_cast<std::size_t>(std::find(mates.begin(), mates.end(), rank) - mates.begin());
  for (std::size_t turn = 0; turn < mates.size(); ++turn) {
    const std::size_t index = (own + turn) % mates.size();
    std::size_t sent = 0;
    const auto take = [&](int source, bool all) {
      const auto ids = script.ids(source);
      for (std::size_t t = 0; t < script.counts[static_cast<std::size_t>(source)]; ++t) {
        const bool on_node = goes(script, ids, t, [&](int r) {
          return script.node_of[static_cast<std::size_t>(r)] == here;
        });
        if (!all && !on_node) continue;
        if (goes(script, ids, t, [&](int r) { return r == rank; })) {
          rows.push_back({source, t, mates[index], sent});
        }
        ++sent;
      }
    };
    take(mates[index], true);
    for (int node = 0; node < nodes; ++node) {
      if (node != here) take(script.ranks_of(node)[index], false);
    }
  }
  return rows;
}

ep_sent::ep_sent(const ep_script& script)
    : row_bytes_(script.row_bytes()), scale_count_(script.scaled() ? script.scale_count() : 0) {
  for (int r = 0; r < script.ranks; ++r) {
    rows_.push_back(script.rows(r));
    scales_.push_back(script.scaled() ? script.scales(r) : std::vector<float>());
  }
}

bool ep_sent::is_row(const ep_row& row, const std::vector<std::byte>& x,
                     const std::vector<float>& scales, std::size_t at) const {
  const auto source = static_cast<std::size_t>(row.source);
  const auto same = [&](const auto& came, const auto& sent, std::size_t length) {
    return length == 0 || std::memcmp(&came[at * length], &sent[row.token * length],
                                      length * sizeof(came[0])) == 0;
  };
  return same(x, rows_[source], row_bytes_) && same(scales, scales_[source], scale_count_);
}

std::vector<std::uint16_t> combined(const ep_script& script, int rank,
                                    const std::vector<std::uint16_t>& bias, bool weighted,
                                    std::uint64_t without) {
  const std::size_t hidden = script.options.hidden;
  const auto top_k = static_cast<std::size_t>(script.options.top_k);
  const int local = script.options.experts / script.ranks;
  const auto ids = script.ids(rank);
  const auto weights = script.weights(rank);
  std::vector<float> sums(script.counts[static_cast<std::size_t>(rank)] * hidden);
  for (std::size_t i = 0; i < sums.size() && !bias.empty(); ++i) {
    sums[i] = ep::to_float({bias[i]});
  }
  const int nodes = 1 + *std::max_element(script.node_of.begin(), script.node_of.end());
  for (int node = 0; node < nodes; ++node) {
    // What another node makes of a token is summed there, and comes as bf16.
    std::vector<float> of_node(nodes == 1 ? sums : std::vector<float>(sums.size()));
    for (const int at : script.ranks_of(node)) {
      if ((without >> at & 1) != 0) continue;
      const auto rows = rows_received(script, at);
      for (std::size_t row = 0; row < rows.size(); ++row) {
        if (rows[row].source != rank) continue;
        const std::size_t t = rows[row].token;
        std::vector<float> of_rank(hidden);
        if (!script.by_expert()) {
          const auto made = script.made(at, row);
          for (std::size_t i = 0; i < hidden; ++i) of_rank[i] = ep::to_float({made[i]});
        } else {
          for (std::size_t k = 0; k < top_k; ++k) {
            const std::int64_t id = ids[t * top_k + k];
            if (id < 0 || id / local != at) continue;
            const auto made = script.made(at, ep_script::choice(row, k));
            const float weight = weighted ? weights[t * top_k + k] : 1;
            for (std::size_t i = 0; i < hidden; ++i) {
              of_rank[i] = std::fma(ep::to_float({made[i]}), weight, of_rank[i]);
            }
          }
          for (float& one : of_rank) one = ep::to_float(ep::to_bf16(one));
        }
        for (std::size_t i = 0; i < hidden; ++i) of_node[t * hidden + i] += of_rank[i];
      }
    }
    for (std::size_t i = 0; i < sums.size(); ++i) {
      sums[i] = nodes == 1 ? of_node[i] : sums[i] + ep::to_float(ep::to_bf16(of_node[i]));
    }
  }
  std::vector<std::uint16_t> all;
  all.reserve(sums.size());
  for (const float sum : sums) all.push_back(ep::to_bf16(sum).bits);
  return all;
}

}  // namespace evmm::test
