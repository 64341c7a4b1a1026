// SPDX-License-Identifier: Apache-2.0
#include "tests/support/table_rank.hpp"

#include <evmm/units.hpp>

#include <algorithm>
#include <cstring>
#include <random>

namespace evmm::test {

using namespace evmm::units;

namespace {

constexpr std::byte k_untouched{0xee};

address address_of(const void* at) {
  return reinterpret_cast<address>(at);
}

}  // namespace

table_rank::table_rank(const rank_context& at, ep::table_options options, std::size_t most)
    : at_(at),
      heap_(at.make({.reserve = 1_GiB}), {.growth_step = 2_MiB}),
      table_(heap_, options),
      stream_(at.on->create_stream(at.device)),
      versions_(options.rows),
      indices_(heap_, most),
      out_(heap_, most * options.row_bytes) {}

table_rank::~table_rank() {
  at_.on->synchronize(stream_);
  at_.on->destroy_stream(stream_);
}

void table_rank::meet() {
  at_.on->synchronize(stream_);
  at_.ranks->barrier("test: meet");
}

void table_rank::fill(std::uint32_t version) {
  const std::size_t rows = versions_.size();
  const auto ranks = static_cast<std::size_t>(at_.ranks->size());
  // Shares that are not the shards: rows of peers are written too, and several ranks' at once.
  const std::size_t begin = rows * static_cast<std::size_t>(me()) / ranks;
  const std::size_t end = rows * (static_cast<std::size_t>(me()) + 1) / ranks;
  std::fill(versions_.begin(), versions_.end(), version);
  std::vector<std::byte> all;
  for (std::size_t i = begin; i < end; ++i) {
    const auto one = row(i);
    all.insert(all.end(), one.begin(), one.end());
  }
  table_.write(begin, all, stream_);
  meet();
}

std::span<const std::int64_t> table_rank::upload(const std::vector<std::int64_t>& indices) {
  at_.on->copy(address_of(indices_.local()), address_of(indices.data()),
               indices.size() * sizeof(indices[0]), stream_);
  at_.on->synchronize(stream_);
  return {indices_.local(), indices.size()};
}

void table_rank::clear(std::size_t rows) {
  at_.on->fill(address_of(out_.local()), k_untouched, rows * table_.options().row_bytes, stream_);
}

std::size_t table_rank::wrong(const std::vector<std::int64_t>& indices) {
  const std::size_t bytes = table_.options().row_bytes;
  std::vector<std::byte> got(indices.size() * bytes);
  if (got.empty()) return 0;
  at_.on->copy(address_of(got.data()), address_of(out_.local()), got.size(), stream_);
  at_.on->synchronize(stream_);
  const std::vector<std::byte> untouched(bytes, k_untouched);
  std::size_t count = 0;
  for (std::size_t i = 0; i < indices.size(); ++i) {
    const bool here = indices[i] >= 0 && static_cast<std::size_t>(indices[i]) < versions_.size();
    const auto expected = here ? row(static_cast<std::size_t>(indices[i])) : untouched;
    count += std::memcmp(&got[i * bytes], expected.data(), bytes) != 0;
  }
  return count;
}

std::size_t table_rank::gather(const std::vector<std::int64_t>& indices,
                               const ep::gather_options& how) {
  clear(indices.size());
  table_.gather(upload(indices), out_.local(), stream_, how);
  return wrong(indices);
}

void table_rank::scatter(const std::vector<std::int64_t>& indices, std::uint32_t version) {
  written(indices, version);
  std::vector<std::byte> rows;
  for (const std::int64_t index : indices) {
    const auto one = index < 0 ? std::vector<std::byte>(table_.options().row_bytes)
                               : row(static_cast<std::size_t>(index));
    rows.insert(rows.end(), one.begin(), one.end());
  }
  at_.on->copy(address_of(out_.local()), address_of(rows.data()), rows.size(), stream_);
  at_.on->synchronize(stream_);
  table_.scatter(upload(indices), out_.local(), stream_);
}

void table_rank::written(const std::vector<std::int64_t>& indices, std::uint32_t version) {
  for (const std::int64_t index : indices) {
    if (index >= 0) versions_[static_cast<std::size_t>(index)] = version;
  }
}

std::vector<std::byte> table_rank::row(std::size_t index) const {
  return row(index, versions_[index]);
}

std::vector<std::byte> table_rank::row(std::size_t index, std::uint32_t version) const {
  std::vector<std::byte> bytes(table_.options().row_bytes);
  for (std::size_t word = 0; word < bytes.size() / 8; ++word) {
    const std::uint64_t value = (index << 20 | version << 12 | word) * 0x9e3779b97f4a7c15u;
    std::memcpy(&bytes[word * 8], &value, 8);
  }
  return bytes;
}

std::vector<std::int64_t> random_indices(std::size_t count, std::size_t rows, std::uint64_t seed,
                                         unsigned repeat, unsigned masked) {
  std::mt19937_64 next(seed);
  std::vector<std::int64_t> all(count);
  for (std::int64_t& index : all) {
    const std::size_t below =
        repeat > 0 && next() % repeat == 0 ? std::min<std::size_t>(8, rows) : rows;
    index = static_cast<std::int64_t>(next() % below);
    if (masked > 0 && next() % masked == 0) index = -1;
  }
  return all;
}

}  // namespace evmm::test
