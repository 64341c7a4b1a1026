// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/channel_cases.hpp"
#include "tests/support/patterns.hpp"

#include <evmm/comm/symmetric_channel.hpp>
#include <evmm/units.hpp>

#include <random>
#include <span>
#include <thread>

// What the cases of a channel share.

namespace evmm::test {

using namespace evmm::units;

inline constexpr std::size_t k_chunk = 64_KiB;  // small, so that messages are cut

/// A region, a channel on it and a stream, on one rank.
struct channel_bench {
  explicit channel_bench(const rank_context& context,
                         const channel_options& options = {.chunk_bytes = k_chunk, .chunks = 3})
      : at(context),
        region(grown_region(context)),
        channel(region, linked(context, options)),
        stream(context.on->create_stream(context.device)) {}
  channel_bench(const channel_bench&) = delete;
  channel_bench& operator=(const channel_bench&) = delete;
  ~channel_bench() { at.on->destroy_stream(stream); }

  static symmetric_region grown_region(const rank_context& context) {
    symmetric_region made = context.make();
    made.grow(tier::device, context.granule());
    made.grow(tier::host, context.granule());
    return made;
  }

  static channel_options linked(const rank_context& context, channel_options options) {
    if (context.link && options.link == nullptr && context.ranks->node_count() > 1) {
      options.link = context.link();
    }
    return options;
  }

  int ranks() const { return at.ranks->size(); }
  int me() const { return at.ranks->rank().value; }
  address own(std::size_t offset) const {
    return reinterpret_cast<address>(region.local()) + offset;
  }
  std::span<const std::byte> part(std::size_t offset, std::size_t bytes) const {
    return {region.local() + offset, bytes};
  }
  void write(std::size_t offset, std::size_t bytes, std::uint64_t seed) const {
    write_pattern(*at.on, own(offset), bytes, seed, at.device);
  }
  bool holds(std::size_t offset, std::size_t bytes, std::uint64_t seed) const {
    return bytes == 0 || holds_pattern(*at.on, own(offset), bytes, seed, at.device);
  }
  /// Zeroes words of this rank's part, before anybody signals there.
  void clear_words(std::size_t offset, std::size_t count) {
    at.on->fill(own(offset), std::byte{0}, 8 * count, stream);
    channel.synchronize(stream);
    at.ranks->barrier("test: words are zero");
  }
  void finish() {
    channel.synchronize(stream);
    channel.close();
    region.close();
  }

  const rank_context& at;
  symmetric_region region;
  symmetric_channel channel;
  native_stream stream;
};

inline std::uint64_t seed_of(std::uint64_t round, int from, int to) {
  return round * 10'000 + static_cast<std::uint64_t>(from) * 100 + static_cast<std::uint64_t>(to);
}

/// Something of random length between two operations of a stream, to shift ranks against each
/// other.
inline void dawdle(const channel_bench& b, std::mt19937& random) {
  const unsigned turns = random() % 64;
  b.at.on->launch(b.stream, [turns] {
    for (unsigned i = 0; i < turns; ++i) std::this_thread::yield();
  });
}

}  // namespace evmm::test
