// SPDX-License-Identifier: Apache-2.0
#include "comm/unix_sockets.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <system_error>
#include <utility>

#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

namespace evmm {

namespace {

constexpr int k_socket_kind = SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC;

[[noreturn]] void fail(std::string_view doing, int code) {
  throw driver_error(fmt::format("{}: {}", doing, std::generic_category().message(code)), {}, code);
}

struct socket_address {
  sockaddr_un at{};
  socklen_t size = 0;
};

/// A name after a zero byte is abstract: it lives in the kernel alone and dies with the socket.
socket_address address_of(const socket_name& name) {
  constexpr std::string_view prefix = "evmm-";
  socket_address made;
  made.at.sun_family = AF_UNIX;
  char* const path = made.at.sun_path + 1;
  std::copy(name.begin(), name.end(), std::copy(prefix.begin(), prefix.end(), path));
  made.size =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + prefix.size() + name.size());
  return made;
}

unique_fd make_socket() {
  unique_fd made(::socket(AF_UNIX, k_socket_kind, 0));
  if (!made) fail("making a Unix socket", errno);
  return made;
}

}  // namespace

void fill_random(std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const auto got = ::getrandom(bytes.data(), bytes.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("getrandom", errno);
    bytes = bytes.subspan(static_cast<std::size_t>(got));
  }
}

listening_socket listen_locally() {
  listening_socket made;
  std::array<std::byte, std::tuple_size_v<socket_name> / 2> random{};
  fill_random(random);
  for (std::size_t i = 0; i < random.size(); ++i) {
    fmt::format_to_n(&made.name[2 * i], 2, "{:02x}", std::to_integer<unsigned>(random[i]));
  }
  made.socket = make_socket();
  const auto where = address_of(made.name);
  if (::bind(made.socket.get(), reinterpret_cast<const sockaddr*>(&where.at), where.size) != 0) {
    fail("naming a Unix socket", errno);
  }
  if (::listen(made.socket.get(), SOMAXCONN) != 0) fail("listening on a Unix socket", errno);
  return made;
}

unique_fd accept_waiting(int socket) {
  for (;;) {
    unique_fd accepted(::accept4(socket, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (accepted || errno == EAGAIN) return accepted;
    if (errno != EINTR && errno != ECONNABORTED) fail("accepting a connection", errno);
  }
}

unique_fd try_connect(const socket_name& name) {
  auto made = make_socket();
  const auto where = address_of(name);
  for (;;) {
    if (::connect(made.get(), reinterpret_cast<const sockaddr*>(&where.at), where.size) == 0) {
      return made;
    }
    if (errno == EAGAIN) return {};
    if (errno != EINTR) fail("connecting to a Unix socket", errno);
  }
}

peer_credentials credentials_of_peer(int socket) {
  ucred found{};
  socklen_t size = sizeof found;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &found, &size) != 0) {
    fail("asking who is at the other end of a socket", errno);
  }
  return {found.pid, found.uid};
}

peer_credentials own_credentials() {
  return {::getpid(), ::geteuid()};
}

transfer send_packet(int socket, std::span<const std::byte> bytes, std::span<const int> fds) {
  iovec data{const_cast<std::byte*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * k_packet_descriptors)> control{};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* const rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(rights), fds.data(), fds.size_bytes());
  }
  for (;;) {
    if (::sendmsg(socket, &message, MSG_NOSIGNAL) >= 0) return transfer::done;
    switch (errno) {
      case EINTR:
        continue;
      case EAGAIN:
      case ENOBUFS:
      case ETOOMANYREFS:  // this user has many descriptors under way; they will be received
        return transfer::not_now;
      case EPIPE:
      case ECONNRESET:
      case ENOTCONN:
        return transfer::closed;
      default:
        fail("sending to a peer", errno);
    }
  }
}

received_packet receive_packet(int socket) {
  received_packet got;
  got.bytes.resize(k_packet_bytes);
  iovec data{got.bytes.data(), got.bytes.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * k_packet_descriptors)> control{};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t size = 0;
  do {
    size = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    // A reset is told once, ahead of packets that came before it.
  } while (size < 0 && (errno == EINTR || errno == ECONNRESET));
  if (size < 0 && errno == EAGAIN) return got;
  if (size < 0) fail("receiving from a peer", errno);
  // Take the descriptors over first: from here on nothing leaks them.
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr;
       part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const auto count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof fd, sizeof fd);
      got.fds.emplace_back(fd);
    }
  }
  got.bytes.resize(static_cast<std::size_t>(size));
  got.cut = (message.msg_flags & MSG_TRUNC) != 0;
  got.fds_lost = (message.msg_flags & MSG_CTRUNC) != 0;
  // Nobody sends empty packets, so an empty one is the end.
  got.result = size == 0 ? transfer::closed : transfer::done;
  return got;
}

void wait_ready(std::span<pollfd> sockets, std::chrono::steady_clock::time_point deadline,
                std::chrono::milliseconds nap) {
  using std::chrono::milliseconds;
  for (;;) {
    const auto left = std::chrono::ceil<milliseconds>(deadline - std::chrono::steady_clock::now());
    const auto wait = std::clamp(left, milliseconds(0), nap);
    if (::poll(sockets.data(), sockets.size(), static_cast<int>(wait.count())) >= 0) return;
    if (errno != EINTR) fail("waiting for peers", errno);
  }
}

}  // namespace evmm
