// SPDX-License-Identifier: Apache-2.0
#include "comm/footprint.hpp"
#include "comm/symmetric_state.hpp"
#include "lib/memory/region_rules.hpp"
#include "lib/support/format.hpp"
#include "lib/support/log.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

// How a symmetric region comes to be and goes: construction, addresses, close.

namespace evmm {

namespace {

/// Options that every rank must give alike.
struct shared_options {
  std::size_t reserved;
  std::size_t max_segments;
  std::size_t max_segment_bytes;
  std::uint8_t same_address;
};

template <class T>
void require_equal(const std::vector<shared_options>& given, T shared_options::*member,
                   const char* name) {
  for (std::size_t r = 1; r < given.size(); ++r) {
    if (given[r].*member == given[0].*member) continue;
    throw invalid_argument(
        fmt::format("`{}` differs between ranks: rank 0 gave {}, rank {} gave {}", name,
                    given[0].*member, r, given[r].*member),
        "give every rank the same options");
  }
}

/// Where to try when a rank's own choice is taken elsewhere: far from what loaders and stacks use.
constexpr std::array<address, 3> k_quiet_addresses = {
    address{0x1000'0000'0000}, address{0x2000'0000'0000}, address{0x3000'0000'0000}};

}  // namespace

symmetric_region::state::state(std::shared_ptr<bootstrap> ranks_given,
                               std::shared_ptr<driver> driver_given,
                               const symmetric_options& options)
    : ranks(std::move(ranks_given)), on(std::move(driver_given)), device(options.device) {
  if (ranks == nullptr) throw invalid_argument("a symmetric region without a bootstrap");
  agree_on(*ranks, "symmetric_region: options", [&] {
    if (on == nullptr) throw invalid_argument("a symmetric region without a driver");
    limits =
        check_limits(*on, device, options.reserve, options.max_segments, options.max_segment_bytes);
    access = region_access(*on, device, {}, options.cpu_access);
    if (ranks->node_ranks().size() > symmetric_view::max_ranks) {
      throw unsupported(fmt::format("{} ranks share this node, more than the {} that a view holds",
                                    ranks->node_ranks().size(), symmetric_view::max_ranks));
    }
  });
  const auto given = ranks->all_gather_value(
      shared_options{limits.reserved, limits.max_segments, limits.max_segment_bytes,
                     std::uint8_t{options.same_address}},
      "symmetric_region: compare options");
  require_equal(given, &shared_options::reserved, "reserve");
  require_equal(given, &shared_options::max_segments, "max_segments");
  require_equal(given, &shared_options::max_segment_bytes, "max_segment_bytes");
  require_equal(given, &shared_options::same_address, "same_address");
  exchange.emplace(ranks, on);
  source.emplace(*on, source_options{.device = device,
                                     .host = options.host,
                                     .share = exchange->transport(),
                                     .rdma = options.rdma,
                                     .cache_limit = options.cache_limit});
  copies.emplace(*on, device);
  reserve_addresses(options.same_address);
  parts.reserve(ranks->node_ranks().size());
  for (std::size_t r = 0; r < ranks->node_ranks().size(); ++r) {
    parts.emplace_back(range->base() + r * limits.reserved);
  }
}

void symmetric_region::state::reserve_addresses(bool same_wanted) {
  const std::size_t node_ranks = ranks->node_ranks().size();
  const auto reserve = [&](address hint) {
    agree_on(*ranks, "symmetric_region: reserve", [&] {
      if (limits.reserved > std::size_t(-1) / node_ranks) {
        throw invalid_argument(fmt::format("{} for each of {} ranks exceeds the address space",
                                           format_bytes(limits.reserved), node_ranks),
                               "lower `reserve`");
      }
      range.reset();
      range.emplace(*on, region_addresses(node_ranks, limits.reserved), limits.granularity, hint);
    });
    const auto bases = ranks->all_gather_value(range->base(), "symmetric_region: compare bases");
    same_address = std::all_of(bases.begin(), bases.end(),
                               [&](address base) { return base == bases.front(); });
    return bases.front();
  };
  address next = reserve(0);
  if (!same_wanted) return;
  // First where rank 0 happened to land, then where hardly anything ever lies.
  for (std::size_t attempt = 0; !same_address && attempt <= k_quiet_addresses.size(); ++attempt) {
    reserve(next);
    if (attempt < k_quiet_addresses.size()) next = k_quiet_addresses[attempt];
  }
  if (!same_address) {
    log().info("symmetric_region: no address is free on all ranks; offsets work all the same");
  }
}

symmetric_region::state::~state() {
  if (!closed) followers.gone();
}

void symmetric_region::state::close(const uses& in_use) {
  if (closed) return;
  const auto wait = [&] { wait_for(*on, device, in_use); };
  try {
    agree_on(*ranks, "close", wait);
  } catch (const error& gone) {
    if (!ranks->broken()) throw;
    // Whoever is left wants its memory back; its own streams are what counts for that.
    log().warn("closing a symmetric region without its peers: {}", gone.what());
    wait();
  }
  followers.gone();
  closed = true;
  parts.clear();
  exchange.reset();
  copies.reset();
  range.reset();
  source.reset();
}

void symmetric_region::state::check_open() const {
  if (closed) {
    throw invalid_argument("the symmetric region was closed", "make a new one");
  }
}

std::optional<std::size_t> symmetric_region::state::node_rank_of(rank_id rank) const {
  const auto& here = ranks->node_ranks();
  const auto found = std::lower_bound(here.begin(), here.end(), rank);
  if (found == here.end() || *found != rank) return std::nullopt;
  return static_cast<std::size_t>(found - here.begin());
}

const part& symmetric_region::state::part_of(rank_id rank) const {
  check_open();
  if (rank.value < 0 || rank.value >= ranks->size()) {
    throw invalid_argument(
        fmt::format("there is no rank {}: the job has {}", rank.value, ranks->size()));
  }
  const auto index = node_rank_of(rank);
  if (!index) {
    throw unsupported(fmt::format("rank {} runs on node {}, this rank on node {}: no pointer "
                                  "reaches its memory",
                                  rank.value, ranks->nodes()[static_cast<std::size_t>(rank.value)],
                                  ranks->node()),
                      "reachable() tells; go through NCCL or MPI to other nodes");
  }
  return parts[*index];
}

}  // namespace evmm
