// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <vector>

#include <sys/socket.h>

// Bytes and descriptors over one socket, as a program that shares allocations sends them.

namespace evmm::test {

struct passed_message {
  std::string bytes;
  std::vector<int> fds;
};

/// At most 64 KiB and 64 descriptors. False when the socket refuses.
inline bool send_message(int socket, passed_message message) {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(64 * sizeof(int))> control{};
  iovec data{message.bytes.data(), message.bytes.size()};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  if (!message.fds.empty()) {
    const std::size_t bytes = message.fds.size() * sizeof(int);
    header.msg_control = control.data();
    header.msg_controllen = CMSG_SPACE(bytes);
    cmsghdr* const rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(bytes);
    std::memcpy(CMSG_DATA(rights), message.fds.data(), bytes);
  }
  return ::sendmsg(socket, &header, 0) == static_cast<ssize_t>(message.bytes.size());
}

/// Empty when nothing comes.
inline passed_message receive_message(int socket) {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(64 * sizeof(int))> control{};
  passed_message message{std::string(std::size_t{64} << 10, '\0'), {}};
  iovec data{message.bytes.data(), message.bytes.size()};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  header.msg_control = control.data();
  header.msg_controllen = control.size();
  const ssize_t got = ::recvmsg(socket, &header, MSG_CMSG_CLOEXEC);
  message.bytes.resize(static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
  for (cmsghdr* part = CMSG_FIRSTHDR(&header); part != nullptr; part = CMSG_NXTHDR(&header, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    message.fds.resize((part->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    std::memcpy(message.fds.data(), CMSG_DATA(part), message.fds.size() * sizeof(int));
  }
  return message;
}

}  // namespace evmm::test
