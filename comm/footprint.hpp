// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

// What one rank takes for a job of any size. The code asks for what these say, and so does the
// program that prints it for jobs nobody has at hand.

namespace evmm {

/// Addresses of a symmetric region: one stride for each rank of the node.
constexpr std::size_t region_addresses(std::size_t node_ranks, std::size_t reserved) {
  return node_ranks * reserved;
}

/// Handles that a rank maps of its node peers, in a region of so many segments.
constexpr std::size_t imported_handles(std::size_t node_ranks, std::size_t segments) {
  return (node_ranks - 1) * segments;
}

/// Sockets of a handle exchange, one to each other rank of the node; none leaves it.
constexpr std::size_t exchange_sockets(std::size_t node_ranks) {
  return node_ranks - 1;
}

/// The kinds of words that a channel has of its own, one of each for each rank of the job.
enum class channel_word : std::uint8_t {
  barrier,  ///< the sender came to this round
  ready,    ///< the sender lets its blocks of this round be written
  data,     ///< the sender's block of this round is there
};
constexpr std::size_t channel_word_bytes(std::size_t ranks) {
  constexpr std::size_t kinds = 3;
  return kinds * ranks * sizeof(std::uint64_t);
}

/// Times that a barrier goes around: what was put across nodes takes two.
constexpr int barrier_turns(int nodes) {
  return nodes > 1 ? 2 : 1;
}

/// Page-locked memory of a channel to other nodes, for sending and for receiving.
constexpr std::size_t channel_staging_bytes(std::size_t message_bytes, std::size_t messages) {
  return 2 * message_bytes * messages;
}

}  // namespace evmm
