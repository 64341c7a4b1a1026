// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/unix_sockets.hpp"
#include "comm/wire.hpp"

#include <evmm/driver.hpp>
#include <evmm/physical_memory.hpp>
#include <evmm/unique_fd.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

// What ranks say to each other in a handle exchange. A message is one packet, or as many as its
// handles need; each packet stands for itself.

namespace evmm {

enum class message_kind : std::uint16_t {
  handles = 1,  ///< some of the sender's handles
  failure,      ///< there will be none: the error why
  lost,         ///< the sender gives the exchange up for good: the error why
};

struct message_header {
  std::uint32_t magic = 0;
  std::uint16_t version = 0;
  message_kind kind = message_kind::handles;
  std::uint64_t sequence = 0;  ///< counts the exchanges
  std::uint32_t total = 0;     ///< handles in the message
  std::uint32_t first = 0;     ///< index of this packet's first
  std::uint32_t count = 0;     ///< handles in this packet
  std::uint32_t payload = 0;   ///< bytes after the header
};

/// Describes one handle; where it is shared by fd, the packet carries that at its place.
struct wire_handle {
  std::uint64_t bytes = 0;
  std::int32_t kind = 0;
  std::int32_t index = 0;
  std::uint32_t share = 0;
  std::uint32_t rdma = 0;
  fabric_handle fabric{};

  allocation_request request() const;
};

struct outgoing_packet {
  byte_vector bytes;
  std::vector<unique_fd> fds;
};

/// Exports all of `memory`. Throws invalid_argument for memory that was not created to be shared
/// in a way that `transport` allows, and what exporting throws.
std::vector<outgoing_packet> handles_message(std::uint64_t sequence,
                                             std::span<const physical_memory* const> memory,
                                             share_kind transport);
outgoing_packet error_message(message_kind kind, std::uint64_t sequence, const wire_error& why);

struct incoming_packet {
  message_header header;
  std::vector<wire_handle> handles;
  wire_error why;  ///< of a failure
};

/// Takes a packet apart and checks all that can be checked of it alone.
/// Throws peer_error naming `sender`.
incoming_packet read_packet(const received_packet& packet, const std::string& sender);

}  // namespace evmm
