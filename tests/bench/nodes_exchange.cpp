// SPDX-License-Identifier: Apache-2.0
// A token goes to each other node once, however many of its experts are there, and is sent on
// inside: what crosses the network is counted, beside what crosses when rows go rank by rank.
#include "comm/nccl_library.hpp"
#include "lib/memory/device_scope.hpp"
#include "tests/bench/ep_routing.hpp"
#include "tests/bench/nodes_support.hpp"

#include <evmm/comm/nccl_link.hpp>
#include <evmm/comm/symmetric_buffer.hpp>
#include <evmm/comm/symmetric_channel.hpp>
#include <evmm/ep/exchange.hpp>
#include <evmm/units.hpp>

#include <fmt/format.h>
#include <mpi.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace evmm::bench {

namespace {

using namespace evmm::units;

constexpr std::size_t k_hidden = 7168;
constexpr int k_experts = 256;
constexpr int k_top_k = 8;
constexpr std::size_t k_result_bytes = k_hidden * 2;

enum class step { dispatch, combine };

/// Made once for all cases that go by it.
const ep_routing& uniform_routing(int ranks, std::size_t tokens) {
  static auto* const made = new std::map<std::size_t, std::unique_ptr<ep_routing>>;
  auto& routing = (*made)[tokens];
  if (!routing) {
    routing = std::make_unique<ep_routing>(
        moe::generate_routing({.experts = k_experts,
                               .top_k = k_top_k,
                               .tokens = static_cast<std::size_t>(ranks) * tokens}),
        ranks, tokens, placement::in_order);
  }
  return *routing;
}

std::size_t bytes_a_row(ep::payload rows) {
  return rows == ep::payload::fp8 ? k_hidden + k_hidden / 128 * sizeof(float) : k_hidden * 2;
}

/// Rows that cross between nodes when each goes to every rank that wants it, a rank's mean.
double rows_by_rank(const job& at, const ep_routing& routing) {
  const auto node = at.ranks->all_gather_value(at.ranks->node(), "bench: nodes");
  std::size_t rows = 0;
  for (int from = 0; from < routing.ranks(); ++from) {
    for (int to = 0; to < routing.ranks(); ++to) {
      const bool crosses =
          node[static_cast<std::size_t>(from)] != node[static_cast<std::size_t>(to)];
      if (crosses) rows += routing.rows(from, to);
    }
  }
  return static_cast<double>(rows) / routing.ranks();
}

double mean(const job& at, double value) {
  double sum = 0;
  for (const double each : at.ranks->all_gather_value(value, "bench: mean")) sum += each;
  return sum / at.ranks->size();
}

/// Which token a row is: its first eight bytes.
struct stamp {
  std::uint32_t source;
  std::uint32_t token;
};

/// A row of `words`: its stamp, and what follows from it.
void write_row(std::uint64_t* row, std::size_t words, stamp of) {
  const auto first = std::bit_cast<std::uint64_t>(of);
  for (std::size_t i = 0; i < words; ++i) row[i] = first + i * 0x9e3779b97f4a7c15u;
}

/// What a rank's experts make of a token, at one element: small whole numbers, whose sums are exact
/// in bf16.
int result_of(stamp token, std::size_t element) {
  return static_cast<int>((token.source * 5 + token.token * 3 + element) % 8);
}
std::uint16_t bf16_of(int whole) {
  return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(static_cast<float>(whole)) >> 16);
}

/// One rank's tensors, and an exchange whose channel crosses nodes by messages or by NCCL.
class node_exchange {
 public:
  node_exchange(const job& of, std::size_t tokens, ep::payload rows, bool nccl)
      : at_(of),
        routing_(uniform_routing(of.ranks->size(), tokens)),
        row_bytes_(rows == ep::payload::fp8 ? k_hidden : k_hidden * 2),
        heap_(of.make(reserve(of, tokens)), {}),
        stream_(of.on->create_stream(of.device)),
        x_(heap_, tokens * row_bytes_),
        scales_(heap_, tokens * k_hidden / 128),
        weights_(heap_, routing_.ids(0).size()),
        ids_(heap_, routing_.ids(0).size()),
        out_(heap_, tokens * k_hidden) {
    channel_options by{.large = false};
    if (nccl) by.link = make_nccl_link(shared_communicator(of), of.ranks->make_link());
    channel_.emplace(heap_.region(), by);
    exchange_.emplace(heap_, *channel_,
                      ep::exchange_options{.experts = routing_.experts(),
                                           .top_k = routing_.top_k(),
                                           .hidden = k_hidden,
                                           .rows = rows,
                                           .max_tokens = tokens});
    plan_.emplace(exchange_->make_plan());
    std::vector<std::uint64_t> row(row_bytes_ / sizeof(std::uint64_t));
    for (std::size_t t = 0; t < tokens; ++t) {
      write_row(row.data(), row.size(), {rank(), static_cast<std::uint32_t>(t)});
      copy(x_.local() + t * row_bytes_, row.data(), row_bytes_);
    }
    at_.on->fill(reinterpret_cast<address>(scales_.local()), std::byte{0}, scales_.bytes(),
                 stream_);
    copy(ids_.local(), routing_.ids(at_.ranks->rank().value).data(), ids_.bytes());
    copy(weights_.local(), routing_.weights(at_.ranks->rank().value).data(), weights_.bytes());
    at_.ranks->barrier("bench: tensors");
  }
  node_exchange(const node_exchange&) = delete;
  node_exchange& operator=(const node_exchange&) = delete;
  ~node_exchange() {
    channel_->close();  // others may still wait for what this rank sent last
    at_.on->synchronize(stream_);
    plan_.reset();
    exchange_.reset();
    at_.on->destroy_stream(stream_);
  }

  void dispatch() {
    const bool fp8 = exchange_->options().rows == ep::payload::fp8;
    got_ = exchange_->dispatch({.x = x_.local(),
                                .scales = fp8 ? scales_.local() : nullptr,
                                .topk_ids = ids_.local(),
                                .topk_weights = weights_.local(),
                                .count = routing_.tokens()},
                               *plan_, stream_);
    channel_->synchronize(stream_);
  }
  void combine() {
    exchange_->combine(*plan_, out_.local(), nullptr, stream_);
    channel_->synchronize(stream_);
  }

  /// Rows that are missing, come twice, or are not what their senders gave.
  std::size_t wrong_rows() {
    const std::size_t rows = exchange_->counts().rows;
    std::set<std::uint64_t> seen;  // stamps
    std::size_t wrong = rows != routing_.received(at_.ranks->rank().value);
    std::vector<std::uint64_t> row(row_bytes_ / sizeof(std::uint64_t)), expected(row.size());
    received_.clear();
    for (std::size_t r = 0; r < rows; ++r) {
      copy(row.data(), static_cast<const std::byte*>(got_.x) + r * row_bytes_, row_bytes_);
      const auto of = std::bit_cast<stamp>(row[0]);
      received_.push_back(of);
      const bool known =
          of.source < static_cast<std::uint32_t>(routing_.ranks()) && of.token < routing_.tokens();
      if (!known || !seen.insert(row[0]).second ||
          !routing_.goes(static_cast<int>(of.source), of.token, at_.ranks->rank().value)) {
        ++wrong;
        continue;
      }
      write_row(expected.data(), expected.size(), of);
      wrong += row != expected;
    }
    return wrong;
  }
  /// For the rows that wrong_rows() saw last.
  void write_results() {
    std::vector<std::uint16_t> row(k_hidden);
    auto* const to = static_cast<std::byte*>(exchange_->combine_buffer());
    for (std::size_t r = 0; r < received_.size(); ++r) {
      for (std::size_t e = 0; e < k_hidden; ++e) row[e] = bf16_of(result_of(received_[r], e));
      copy(to + r * k_result_bytes, row.data(), k_result_bytes);
    }
    at_.ranks->barrier("bench: results");
  }
  std::size_t wrong_sums() {
    std::size_t wrong = 0;
    std::vector<std::uint16_t> row(k_hidden);
    for (std::size_t t = 0; t < routing_.tokens(); ++t) {
      copy(row.data(), out_.local() + t * k_hidden, k_result_bytes);
      const stamp of{rank(), static_cast<std::uint32_t>(t)};
      const int ranks = std::popcount(routing_.masks(at_.ranks->rank().value)[t]);
      for (std::size_t e = 0; e < k_hidden; ++e) {
        wrong += row[e] != bf16_of(ranks * result_of(of, e));
      }
    }
    return wrong;
  }

  /// So that what is compared next was written since.
  void spoil() {
    at_.on->fill(reinterpret_cast<address>(got_.x), std::byte{0}, received_.size() * row_bytes_,
                 stream_);
    at_.on->fill(reinterpret_cast<address>(out_.local()), std::byte{0xff}, out_.bytes(), stream_);
    at_.on->synchronize(stream_);
    at_.ranks->barrier("bench: spoilt");
  }

  std::uint64_t crossed() const { return channel_->statistics().link_bytes; }
  std::string way() const { return channel_->statistics().exchange; }
  const ep_routing& routing() const { return routing_; }
  void check() { exchange_->check(); }

 private:
  static std::size_t reserve(const job& of, std::size_t tokens) {
    return 2_GiB + static_cast<std::size_t>(of.ranks->size()) * tokens * k_hidden * 8;
  }
  std::uint32_t rank() const { return static_cast<std::uint32_t>(at_.ranks->rank().value); }
  // Copies of pageable memory are not for streams that wait for messages: these wait for none.
  void copy(void* to, const void* from, std::size_t bytes) {
    at_.on->copy(reinterpret_cast<address>(to), reinterpret_cast<address>(from), bytes, stream_);
    at_.on->synchronize(stream_);
  }

  job at_;
  const ep_routing& routing_;
  std::size_t row_bytes_;
  symmetric_heap heap_;
  native_stream stream_;
  symmetric_buffer<std::byte> x_;
  symmetric_buffer<float> scales_, weights_;
  symmetric_buffer<std::int64_t> ids_;
  symmetric_buffer<std::uint16_t> out_;
  std::optional<symmetric_channel> channel_;
  std::optional<ep::exchange> exchange_;
  std::optional<ep::plan> plan_;
  ep::received got_;
  std::vector<stamp> received_;
};

void measure_exchange(benchmark::State& state, const job& at, std::size_t tokens, ep::payload rows,
                      step what, bool nccl) {
  if (at.ranks->node_count() == 1) {
    throw unsupported("all ranks are on one node, and nothing crosses",
                      "start ranks on several hosts, or set EVMM_BENCH_RANKS_A_NODE");
  }
  node_exchange mine(at, tokens, rows, nccl);
  const std::size_t row = what == step::combine ? k_result_bytes : bytes_a_row(rows);
  mine.dispatch();
  std::size_t wrong = mine.wrong_rows();
  mine.write_results();
  mine.combine();
  wrong += mine.wrong_sums();
  if (at.refuse(state, wrong, "before the rounds")) return;

  mine.spoil();
  const std::uint64_t before = mine.crossed();
  measure_together(state, at, [&] { what == step::combine ? mine.combine() : mine.dispatch(); });
  const double crossed = static_cast<double>(mine.crossed() - before) / (k_node_rounds + 1);
  wrong = what == step::combine ? mine.wrong_sums() : mine.wrong_rows();
  mine.check();
  if (at.refuse(state, wrong, "after the rounds")) return;
  state.counters["crossed_MB"] = mean(at, crossed) * 1e-6;
  state.counters["by_rank_MB"] = rows_by_rank(at, mine.routing()) * static_cast<double>(row) * 1e-6;
  state.SetLabel(mine.way());
  at.ranks->barrier("bench: done");
}

/// The same rows, packed beforehand, from each rank to each that wants them: what a program has
/// that knows of no nodes, without the permutation that it needs.
class flat_exchange {
 public:
  flat_exchange(const job& of, std::size_t tokens, std::size_t row)
      : at_(of),
        routing_(uniform_routing(of.ranks->size(), tokens)),
        row_(row),
        stream_(of.on->create_stream(of.device)),
        out_(at_.on->allocate_async(of.device, routing_.sent(me()) * row, stream_)),
        in_(at_.on->allocate_async(of.device, routing_.received(me()) * row, stream_)) {}
  flat_exchange(const flat_exchange&) = delete;
  flat_exchange& operator=(const flat_exchange&) = delete;
  ~flat_exchange() {
    at_.on->free_async(out_, stream_);
    at_.on->free_async(in_, stream_);
    at_.on->synchronize(stream_);
    at_.on->destroy_stream(stream_);
  }

  void by_nccl(nccl_communicator& nccl) {
    const nccl_api& api = load_nccl().api;
    const device_scope current(*at_.on, at_.device);
    api.group_start();
    for (int peer = 0; peer < routing_.ranks(); ++peer) {
      const std::size_t sends = routing_.rows(me(), peer) * row_;
      const std::size_t receives = routing_.rows(peer, me()) * row_;
      const address from = out_ + routing_.sent_before(me(), peer) * row_;
      const address to = in_ + routing_.received_before(me(), peer) * row_;
      if (peer == me()) {
        at_.on->copy(to, from, sends, stream_);
        continue;
      }
      if (sends > 0) {
        api.send(reinterpret_cast<void*>(from), sends, nccl_int8, peer, nccl.get(), stream_);
      }
      if (receives > 0) {
        api.receive(reinterpret_cast<void*>(to), receives, nccl_int8, peer, nccl.get(), stream_);
      }
    }
    api.group_end();
    nccl.settle("ncclSend and ncclRecv");
    at_.on->synchronize(stream_);
  }

  /// Through page-locked memory of the host, `staged_out` and `staged_in`.
  void by_mpi(address staged_out, address staged_in) {
    const auto n = static_cast<std::size_t>(routing_.ranks());
    std::vector<int> sends(n), send_at(n), receives(n), receive_at(n);
    for (int peer = 0; peer < routing_.ranks(); ++peer) {
      const auto p = static_cast<std::size_t>(peer);
      sends[p] = static_cast<int>(routing_.rows(me(), peer) * row_);
      send_at[p] = static_cast<int>(routing_.sent_before(me(), peer) * row_);
      receives[p] = static_cast<int>(routing_.rows(peer, me()) * row_);
      receive_at[p] = static_cast<int>(routing_.received_before(me(), peer) * row_);
    }
    at_.on->copy(staged_out, out_, sent_bytes(), stream_);
    at_.on->synchronize(stream_);
    MPI_Alltoallv(reinterpret_cast<void*>(staged_out), sends.data(), send_at.data(), MPI_BYTE,
                  reinterpret_cast<void*>(staged_in), receives.data(), receive_at.data(), MPI_BYTE,
                  MPI_COMM_WORLD);
    at_.on->copy(in_, staged_in, received_bytes(), stream_);
    at_.on->synchronize(stream_);
  }

  std::size_t sent_bytes() const { return routing_.sent(me()) * row_; }
  std::size_t received_bytes() const { return routing_.received(me()) * row_; }
  double crossing_bytes() const { return rows_by_rank(at_, routing_) * static_cast<double>(row_); }

 private:
  int me() const { return at_.ranks->rank().value; }

  job at_;
  const ep_routing& routing_;
  std::size_t row_;
  native_stream stream_;
  address out_, in_;
};

void measure_by_nccl(benchmark::State& state, const job& at, std::size_t tokens, std::size_t row) {
  nccl_communicator& nccl = shared_communicator(at);
  flat_exchange flat(at, tokens, row);
  measure_together(state, at, [&] { flat.by_nccl(nccl); });
  state.counters["by_rank_MB"] = flat.crossing_bytes() * 1e-6;
}

void measure_by_mpi(benchmark::State& state, const job& at, std::size_t tokens, std::size_t row) {
  flat_exchange flat(at, tokens, row);
  const address out = at.on->allocate_pinned(flat.sent_bytes());
  const address in = at.on->allocate_pinned(flat.received_bytes());
  measure_together(state, at, [&] { flat.by_mpi(out, in); });
  at.on->free_pinned(out);
  at.on->free_pinned(in);
  state.counters["by_rank_MB"] = flat.crossing_bytes() * 1e-6;
}

}  // namespace

void add_node_exchanges(const job& at) {
  struct kind {
    const char* name;
    ep::payload rows;
    step of;
  };
  const kind kinds[] = {{"dispatch_fp8", ep::payload::fp8, step::dispatch},
                        {"dispatch_bf16", ep::payload::bf16, step::dispatch},
                        {"combine", ep::payload::bf16, step::combine}};
  const bool cuda = at.on->info().kind == driver_kind::cuda;
  for (const kind& what : kinds) {
    for (const std::size_t tokens : {128, 1024, 4096}) {
      const auto add = [&](const char* way, const std::function<void(benchmark::State&)>& body) {
        add_case(fmt::format("nodes/{}/{}/tokens:{}", what.name, way, tokens), k_node_rounds, body);
      };
      const std::size_t row = what.of == step::combine ? k_result_bytes : bytes_a_row(what.rows);
      add("messages", [=](benchmark::State& state) {
        measure_exchange(state, at, tokens, what.rows, what.of, false);
      });
      if (cuda) {
        add("nccl", [=](benchmark::State& state) {
          measure_exchange(state, at, tokens, what.rows, what.of, true);
        });
        add("peer_nccl_by_rank",
            [=](benchmark::State& state) { measure_by_nccl(state, at, tokens, row); });
      }
      add("peer_mpi_by_rank",
          [=](benchmark::State& state) { measure_by_mpi(state, at, tokens, row); });
    }
  }
}

}  // namespace evmm::bench
