// SPDX-License-Identifier: Apache-2.0
#include "comm/handshake.hpp"

#include "comm/ranks_text.hpp"
#include "lib/support/log.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

namespace evmm {

namespace {

using clock = std::chrono::steady_clock;

/// Time taken does not tell how much of it was right.
bool same_secret(const job_secret& a, const job_secret& b) {
  std::byte difference{0};
  for (std::size_t i = 0; i < a.size(); ++i) difference |= a[i] ^ b[i];
  return difference == std::byte{0};
}

class handshake {
 public:
  handshake(const listening_socket& listening, std::span<const endpoint> node, std::size_t self,
            const job_secret& secret)
      : listening_(listening), node_(node), self_(self), secret_(secret), links_(node.size()) {}

  std::vector<unique_fd> run(clock::time_point deadline, std::chrono::milliseconds timeout) {
    std::vector<pollfd> ready;
    for (;;) {
      bool queue_full = false;
      for (std::size_t lower = 0; lower < self_; ++lower) {
        if (!links_[lower].socket && !call(lower)) queue_full = true;
      }
      const auto missing = ranks_missing();
      if (missing.empty()) break;
      if (clock::now() >= deadline) {
        throw timed_out(not_arrived("connecting the node's ranks", missing, timeout));
      }
      ready.assign(1, {listening_.socket.get(), POLLIN, 0});
      for (const auto& link : links_) {
        if (link.socket && !link.proved) ready.push_back({link.socket.get(), POLLIN, 0});
      }
      for (const auto& guest : guests_) ready.push_back({guest.get(), POLLIN, 0});
      wait_ready(ready, deadline, std::chrono::milliseconds(queue_full ? 1 : 1000));
      hear_answers();
      while (auto guest = accept_waiting(listening_.socket.get())) admit(std::move(guest));
      hear_guests();
    }
    std::vector<unique_fd> sockets;
    for (auto& link : links_) sockets.push_back(std::move(link.socket));
    return sockets;
  }

 private:
  struct link {
    unique_fd socket;
    bool proved = false;
  };

  std::vector<int> ranks_missing() const {
    std::vector<int> ranks;
    for (std::size_t i = 0; i < node_.size(); ++i) {
      if (i != self_ && !links_[i].proved) ranks.push_back(node_[i].rank);
    }
    return ranks;
  }

  /// Calls a lower rank. False when its queue is full just now.
  bool call(std::size_t lower) {
    const auto& callee = node_[lower];
    unique_fd socket;
    try {
      socket = try_connect(callee.name);
    } catch (const driver_error& failure) {
      throw peer_error(fmt::format("rank {} cannot be reached: {}", callee.rank, failure.message()),
                       "did it end?", failure.native_code());
    }
    if (!socket) return false;
    // Before the secret is shown: is it really that rank's process?
    if (credentials_of_peer(socket.get()) != callee.who) {
      throw peer_error(
          fmt::format("the socket of rank {} belongs to another process or user", callee.rank));
    }
    say_hello(socket.get());
    links_[lower].socket = std::move(socket);
    return true;
  }

  void say_hello(int socket) {
    hello mine;
    mine.secret = secret_;
    mine.rank = node_[self_].rank;
    // A fresh socket has room; a peer that is gone shows when it is listened to.
    static_cast<void>(send_packet(socket, std::as_bytes(std::span{&mine, 1})));
  }

  /// A hello that shows the secret; nothing for anything else.
  std::optional<hello> read_hello(const received_packet& packet) const {
    hello read;
    if (packet.result != transfer::done || packet.cut || packet.bytes.size() != sizeof read) {
      return std::nullopt;
    }
    std::memcpy(&read, packet.bytes.data(), sizeof read);
    if (read.magic != k_exchange_magic || !same_secret(read.secret, secret_)) return std::nullopt;
    if (read.version != k_exchange_version) {
      throw peer_error(fmt::format("rank {} speaks version {} of the handle exchange, rank {} "
                                   "version {}",
                                   read.rank, read.version, node_[self_].rank, k_exchange_version),
                       "run the same evmm on all ranks");
    }
    return read;
  }

  void hear_answers() {
    for (std::size_t i = 0; i < links_.size(); ++i) {
      auto& link = links_[i];
      if (!link.socket || link.proved) continue;
      const auto packet = receive_packet(link.socket.get());
      if (packet.result == transfer::not_now) continue;
      const auto answer = read_hello(packet);
      if (!answer || answer->rank != node_[i].rank) {
        throw peer_error(
            fmt::format("rank {} {} while ranks of its node connected", node_[i].rank,
                        packet.result == transfer::closed ? "hung up" : "did not show the secret"));
      }
      link.proved = true;
    }
  }

  /// Only the processes that were announced may speak at all.
  void admit(unique_fd guest) {
    const auto who = credentials_of_peer(guest.get());
    const auto higher = node_.subspan(self_ + 1);
    if (std::any_of(higher.begin(), higher.end(),
                    [&](const endpoint& e) { return e.who == who; })) {
      guests_.push_back(std::move(guest));
    } else {
      log().warn("turned away process {} of user {}, which is no rank of this job", who.process,
                 who.user);
    }
  }

  void hear_guests() {
    std::erase_if(guests_, [this](unique_fd& guest) {
      const auto packet = receive_packet(guest.get());
      if (packet.result == transfer::not_now) return false;
      const auto who = credentials_of_peer(guest.get());
      const auto greeting = read_hello(packet);
      for (std::size_t i = self_ + 1; greeting && i < node_.size(); ++i) {
        if (node_[i].rank != greeting->rank || node_[i].who != who || links_[i].socket) continue;
        say_hello(guest.get());
        links_[i] = {std::move(guest), true};
        return true;
      }
      log().warn("turned away a connection of process {}, which did not prove to be its rank",
                 who.process);
      return true;
    });
  }

  const listening_socket& listening_;
  std::span<const endpoint> node_;
  std::size_t self_;
  const job_secret& secret_;
  std::vector<link> links_;
  std::vector<unique_fd> guests_;  ///< admitted by their credentials, not yet heard
};

}  // namespace

std::vector<unique_fd> connect_node(const listening_socket& listening,
                                    std::span<const endpoint> node, std::size_t self,
                                    const job_secret& secret, clock::time_point deadline,
                                    std::chrono::milliseconds timeout) {
  return handshake(listening, node, self, secret).run(deadline, timeout);
}

}  // namespace evmm
