// SPDX-License-Identifier: Apache-2.0
#include "comm/collective_change.hpp"
#include "comm/nccl_state.hpp"
#include "comm/put_exchange.hpp"
#include "lib/memory/copier.hpp"
#include "lib/support/format.hpp"
#include "lib/support/log.hpp"

#include <evmm/comm/nccl_window.hpp>
#include <evmm/comm/symmetric_region.hpp>
#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <exception>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

// What works here, found out by doing: memory is registered as users' memory would be, and the
// bytes that NCCL moves in it are compared.

namespace evmm {

namespace {

constexpr std::array k_abilities = {nccl_ability::user_buffers,
                                    nccl_ability::windows,
                                    nccl_ability::several_segments,
                                    nccl_ability::host_segments,
                                    nccl_ability::host_segments_over_network,
                                    nccl_ability::peer_pointers,
                                    nccl_ability::gin};

/// A stream for a collective.
class scoped_stream {
 public:
  explicit scoped_stream(std::shared_ptr<nccl_communicator::state> over)
      : over_(std::move(over)), stream_(over_->on->create_stream(over_->device)) {}
  scoped_stream(const scoped_stream&) = delete;
  scoped_stream& operator=(const scoped_stream&) = delete;
  /// Waits for what an aborted collective has still running: the memory that it works on goes next.
  ~scoped_stream() {
    log_failure("waiting for a collective's end", [&] {
      over_->wait_until("a collective that failed", [&] { return over_->on->idle(stream_); });
    });
    log_failure("destroying a stream", [&] { over_->on->destroy_stream(stream_); });
  }
  native_stream get() const noexcept { return stream_; }

 private:
  std::shared_ptr<nccl_communicator::state> over_;
  native_stream stream_;
};

/// What memory is filled with, again and again: 61, so that no segment begins as another does.
using pattern = std::array<float, 61>;

/// What a rank writes: small, so that sums are exact, and never 0, which memory holds that nobody
/// wrote.
pattern pattern_of(rank_id rank) {
  pattern words{};
  for (std::size_t i = 0; i < words.size(); ++i) {
    words[i] =
        static_cast<float>(1 + (i + 7 * static_cast<std::size_t>(rank.value)) % words.size());
  }
  return words;
}

std::vector<float> repeat(const pattern& words, std::size_t count) {
  std::vector<float> all(count);
  for (std::size_t i = 0; i < count; i += words.size()) {
    std::copy_n(words.begin(), std::min(words.size(), count - i), &all[i]);
  }
  return all;
}

/// A region of this rank's, as long as an ability is tried with it.
class trial {
 public:
  /// Collective.
  trial(const nccl_communicator::state& like, const symmetric_options& options,
        const std::vector<tier>& segments)
      : ranks_(*like.ranks), region_(like.ranks, like.on, options), copies_(*like.on, like.device) {
    for (const tier kind : segments) region_.grow(kind, region_.granularity());
  }

  symmetric_region& region() { return region_; }

  /// All ranks sum the whole region, across the borders of its segments.
  void check_sum(const std::shared_ptr<nccl_communicator::state>& over) {
    std::optional<scoped_stream> stream;
    agree_on(ranks_, "nccl_communicator: probe: before the sum", [&] {
      write();
      stream.emplace(over);
    });
    // Of floats: NCCL's symmetric kernels, which go through the window, sum no integers.
    agree_on(ranks_, "nccl_communicator: probe: sum", [&] {
      over->all_reduce("ncclAllReduce", reinterpret_cast<address>(region_.local()), words(),
                       stream->get());
    });
    agree_on(ranks_, "nccl_communicator: probe: after the sum", [&] {
      pattern sums{};
      for (int r = 0; r < ranks_.size(); ++r) {
        const pattern theirs = pattern_of({r});
        std::transform(sums.begin(), sums.end(), theirs.begin(), sums.begin(), std::plus<>());
      }
      compare(region_.local(), "a sum over all ranks", sums);
    });
  }

  /// All ranks read what each rank of their node wrote.
  void check_pointers(const nccl_window& window) {
    agree_on(ranks_, "nccl_communicator: probe: write", [&] { write(); });
    // Which also keeps the memory in place until all have read it.
    agree_on(ranks_, "nccl_communicator: probe: read", [&] {
      for (const rank_id peer : ranks_.node_ranks()) {
        compare(window.peer(peer, 0), fmt::format("rank {}'s memory at NCCL's address", peer.value),
                pattern_of(peer));
      }
    });
  }

 private:
  std::size_t words() const { return region_.size() / sizeof(float); }

  void write() {
    const std::vector<float> all = repeat(pattern_of(region_.rank()), words());
    copies_.copy(reinterpret_cast<address>(region_.local()), reinterpret_cast<address>(all.data()),
                 region_.size());
  }
  void compare(const std::byte* at, const std::string& what, const pattern& written) {
    const std::vector<float> expected = repeat(written, words());
    std::vector<float> found(words());
    copies_.copy(reinterpret_cast<address>(found.data()), reinterpret_cast<address>(at),
                 region_.size());
    const auto wrong = std::mismatch(found.begin(), found.end(), expected.begin());
    if (wrong.first == found.end()) return;
    const auto words_before = static_cast<std::size_t>(wrong.first - found.begin());
    throw driver_error(fmt::format("{} is wrong from {} of {} on: {} where {} belongs", what,
                                   format_bytes(words_before * sizeof(float)),
                                   format_bytes(region_.size()), *wrong.first, *wrong.second),
                       "NCCL reported no error; use another version of it, or do without");
  }

  bootstrap& ranks_;
  symmetric_region region_;
  copier copies_;
};

class prober {
 public:
  /// Local.
  explicit prober(const nccl_communicator::state& like)
      : like_(like),
        ranks_(*like.ranks),
        options_{
            .device = like.device,
            .reserve = k_most_segments * like.on->granularity(memory_location::on(like.device)),
            // What NCCL needs between nodes.
            .rdma = ranks_.node_count() > 1 && like.on->describe(like.device).rdma_capable} {}

  /// Collective.
  std::vector<nccl_finding> run() {
    for (const nccl_ability each : k_abilities) found_.push_back(examine(each));
    if (spare_) log_failure("closing the communicator of a probe", [&] { spare_->close(); });
    return std::move(found_);
  }

 private:
  nccl_finding examine(nccl_ability ability) {
    nccl_finding found{.ability = ability};
    found.why_not = agree_on_reason(ranks_, like_.why_not_claimed(ability),
                                    "nccl_communicator: probe: claimed");
    const std::vector<tier> segments = segments_for(ability);
    if (!found.works() || segments.empty()) return found;
    found.tried = true;
    try {
      attempt(ability, segments);
    } catch (const std::exception& failure) {  // the same on all ranks
      if (ranks_.broken()) throw;
      found.why_not = fmt::format("{} failed when tried: {}", to_string(ability), failure.what());
      // Aborted: it may be out of step, and what is left is not to suffer from that.
      spare_.reset();
    }
    return found;
  }

  /// With what an ability is tried; nothing where it is not.
  std::vector<tier> segments_for(nccl_ability ability) const {
    switch (ability) {
      case nccl_ability::user_buffers:
      case nccl_ability::windows:
        return {tier::device};
      case nccl_ability::several_segments:
        return {tier::device, tier::device};
      case nccl_ability::host_segments:
        if (ranks_.node_count() > 1) return {};
        return {tier::device, tier::host};
      case nccl_ability::peer_pointers:
        // Into all that a window was seen to cover, and no further: nothing is mapped there.
        for (const auto wider : {nccl_ability::host_segments, nccl_ability::several_segments}) {
          for (const nccl_finding& each : found_) {
            if (each.ability == wider && each.tried && each.works()) return segments_for(wider);
          }
        }
        return {tier::device};
      case nccl_ability::host_segments_over_network:
      case nccl_ability::gin:
        break;
    }
    return {};
  }

  void attempt(nccl_ability ability, const std::vector<tier>& segments) {
    trial tried(like_, options_, segments);
    if (!spare_) spare_.emplace(like_.ranks, like_.on, nccl_options{.device = like_.device});
    if (ability == nccl_ability::user_buffers) {
      const nccl_user_buffer registered(*spare_, tried.region());
      tried.check_sum(spare_->shared());
      return;
    }
    // In one window: the only collective on it touches all of it.
    const nccl_window registered(*spare_, tried.region(), {.kernels_only = true},
                                 nccl_window::offsets::symmetric);
    if (ability == nccl_ability::peer_pointers) {
      tried.check_pointers(registered);
    } else {
      tried.check_sum(spare_->shared());
    }
  }

  static constexpr std::size_t k_most_segments = 2;

  const nccl_communicator::state& like_;
  bootstrap& ranks_;
  symmetric_options options_;
  std::optional<nccl_communicator> spare_;
  std::vector<nccl_finding> found_;
};

}  // namespace

std::vector<nccl_finding> nccl_communicator::state::probe() {
  std::optional<prober> trials;
  agree_on(*ranks, "nccl_communicator: probe", [&] {
    check_usable();
    check_bare();
    trials.emplace(*this);
  });
  probed = trials->run();
  return probed;
}

}  // namespace evmm
