// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/unix_sockets.hpp"

#include <evmm/unique_fd.hpp>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace evmm {

inline constexpr std::uint32_t k_exchange_magic = 0x65766d78;  // "evmx"
/// Of the hello and of the messages after it.
inline constexpr std::uint16_t k_exchange_version = 1;

/// Known to the job's ranks alone: rank 0 makes it, and it travels through the bootstrap.
using job_secret = std::array<std::byte, 32>;

/// The first packet in each direction. Magic, version and secret keep their places in all versions.
struct hello {
  std::uint32_t magic = k_exchange_magic;
  std::uint16_t version = k_exchange_version;
  std::uint16_t unused = 0;
  job_secret secret{};
  std::int32_t rank = -1;
};

static_assert(sizeof(hello) == 44, "no padding: it would carry what lay in memory");

/// What a rank of the node tells about itself through the bootstrap.
struct endpoint {
  int rank = -1;
  peer_credentials who;
  socket_name name{};
};

/// Connects this rank, `node[self]`, with each other rank of the node: the higher of two connects
/// to the lower, then both show the secret. Whoever else connects is turned away and changes
/// nothing. The result is by node rank, without a socket for this one.
/// Throws peer_error or timed_out naming ranks.
std::vector<unique_fd> connect_node(const listening_socket& listening,
                                    std::span<const endpoint> node, std::size_t self,
                                    const job_secret& secret,
                                    std::chrono::steady_clock::time_point deadline,
                                    std::chrono::milliseconds timeout);

}  // namespace evmm
