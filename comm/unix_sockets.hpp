// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/unique_fd.hpp>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <poll.h>
#include <sys/types.h>

// Sockets between the processes of a node: local, in the abstract namespace, of packets, so that a
// message and its descriptors arrive whole or not at all. All of them are non-blocking.

namespace evmm {

/// Bytes from the kernel's generator that nobody can guess.
void fill_random(std::span<std::byte> bytes);

/// 128 random bits in hexadecimal.
using socket_name = std::array<char, 32>;

struct listening_socket {
  socket_name name{};
  unique_fd socket;
};
/// A socket that peers can connect to by its name. Throws driver_error.
listening_socket listen_locally();

/// The next waiting connection, or none.
unique_fd accept_waiting(int socket);
/// Connects to a listening socket; none when its queue is full just now.
/// Throws driver_error with ECONNREFUSED when nobody listens.
unique_fd try_connect(const socket_name& name);

/// Who is at the other end, says the kernel.
struct peer_credentials {
  pid_t process = 0;
  uid_t user = 0;
  friend bool operator==(const peer_credentials&, const peer_credentials&) = default;
};
peer_credentials credentials_of_peer(int socket);
peer_credentials own_credentials();

enum class transfer : std::uint8_t { done, not_now, closed };

/// Descriptors in one packet; the kernel takes up to 253.
inline constexpr std::size_t k_packet_descriptors = 64;
/// Bytes in one packet, well below what a socket's buffer takes.
inline constexpr std::size_t k_packet_bytes = std::size_t{32} << 10;

/// Sends one packet whole, or nothing of it.
transfer send_packet(int socket, std::span<const std::byte> bytes, std::span<const int> fds = {});

struct received_packet {
  transfer result = transfer::not_now;
  std::vector<std::byte> bytes;
  std::vector<unique_fd> fds;
  bool cut = false;       ///< it was longer than k_packet_bytes
  bool fds_lost = false;  ///< descriptors are missing: this process has too many open
};
received_packet receive_packet(int socket);

/// poll() that goes on after signals, until something is ready, the deadline, or `nap` has passed.
void wait_ready(std::span<pollfd> sockets, std::chrono::steady_clock::time_point deadline,
                std::chrono::milliseconds nap = std::chrono::hours(1));

}  // namespace evmm
