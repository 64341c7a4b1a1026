// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/comm/node_link.hpp>

#include <cstdint>
#include <span>
#include <vector>

namespace evmm {

/// One step of an exchange by one-sided puts, on this rank.
///
/// Each rank has two signals for each other one, which only grow: `ready`, which the other raises
/// by one when its stream has come to a block that this rank sends it, and `data`, which it raises
/// by one with each block that it puts here.
struct put_step {
  enum class what : std::uint8_t {
    announce,  ///< raises `ready` at the peer
    put,       ///< waits until `ready` of the peer is `value`; puts, and raises `data` at the peer
    await,     ///< waits until `data` of the peer is `value`
  };
  what kind = what::announce;
  int peer = 0;
  std::uint64_t value = 0;
  std::uint64_t from = 0;  ///< of a put: offset in this rank's part
  std::uint64_t to = 0;    ///< and in the peer's
  std::uint64_t bytes = 0;
};

/// Which signals those are, on every rank alike.
constexpr std::uint32_t ready_signal(int peer) {
  return 2 * static_cast<std::uint32_t>(peer);
}
constexpr std::uint32_t data_signal(int peer) {
  return 2 * static_cast<std::uint32_t>(peer) + 1;
}
constexpr int put_signals(int ranks) {
  return 2 * ranks;
}

/// Makes blocks into steps, and knows what the signals will be. Nobody tells a value to anybody:
/// both ends of a block count it, so all exchanges of a rank must be carried out in one order.
class put_plan {
 public:
  explicit put_plan(int ranks)
      : to_(static_cast<std::size_t>(ranks)), from_(static_cast<std::size_t>(ranks)) {}

  /// The next exchange: all that announces, then all puts, then all that awaits. No step waits for
  /// one of its own kind, here or elsewhere, so that they may be carried out in any portions.
  std::vector<put_step> next(std::span<const node_exchange::block> out,
                             std::span<const node_exchange::block> in);

 private:
  std::vector<std::uint64_t> to_;    ///< blocks so far, by the rank that they went to
  std::vector<std::uint64_t> from_;  ///< and by the rank that they came from
};

}  // namespace evmm
