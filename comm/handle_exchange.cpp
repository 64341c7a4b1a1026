// SPDX-License-Identifier: Apache-2.0
#include "comm/handle_messages.hpp"
#include "comm/handshake.hpp"
#include "comm/ranks_text.hpp"
#include "comm/unix_sockets.hpp"
#include "comm/wire.hpp"
#include "lib/support/log.hpp"

#include <evmm/comm/handle_exchange.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

namespace evmm {

namespace {

using clock = std::chrono::steady_clock;
using memory_lists = std::vector<std::vector<physical_memory>>;

/// What each rank tells all others when the exchange is made.
struct announcement {
  endpoint where;
  std::uint32_t fabric = 0;
  std::uint32_t driver = 0;  ///< its driver_kind
};
static_assert(std::has_unique_object_representations_v<announcement>);

/// Throws the same on every rank when a node has ranks of several users, since memory goes to no
/// other user's processes, or with several kinds of drivers, which cannot take each other's.
void require_alike(const bootstrap& job, const std::vector<announcement>& everyone) {
  const auto name = [](std::uint32_t driver) {
    return static_cast<driver_kind>(driver) == driver_kind::cuda ? "cuda" : "host";
  };
  for (std::size_t r = 0; r < everyone.size(); ++r) {
    const auto first = static_cast<std::size_t>(
        std::find(job.nodes().begin(), job.nodes().end(), job.nodes()[r]) - job.nodes().begin());
    const announcement& mine = everyone[r];
    const announcement& other = everyone[first];
    if (mine.where.who.user != other.where.who.user) {
      throw peer_error(fmt::format("rank {} runs as user {}, rank {} of the same node as user {}",
                                   first, other.where.who.user, r, mine.where.who.user),
                       "start all ranks of a node as one user");
    }
    if (mine.driver != other.driver) {
      throw invalid_argument(
          fmt::format("rank {} has the {} driver, rank {} of the same node the {} driver", first,
                      name(other.driver), r, name(mine.driver)),
          "see that every rank has a GPU (CUDA_VISIBLE_DEVICES), or set EVMM_DRIVER for all");
    }
  }
}

/// Half of a step's time, so that a rank which finds a peer missing still meets the others in
/// agree.
bootstrap::milliseconds time_for_a_part(const bootstrap& job) {
  return std::max(job.timeout() / 2, bootstrap::milliseconds(1));
}

/// One peer's side of one exchange.
struct talk {
  std::size_t node_rank = 0;
  int rank = 0;
  int socket = -1;
  std::size_t sent = 0;      ///< packets
  std::size_t received = 0;  ///< handles
  bool heard = false;        ///< everything it has to say
};

/// One exchange: all peers are spoken and listened to at once, so that no order and no size of
/// messages can make two ranks wait for each other.
class conversation {
 public:
  conversation(driver& on, std::span<const unique_fd> links, std::span<const rank_id> node,
               std::uint64_t sequence, std::size_t lists)
      : on_(on), sequence_(sequence), imported_(lists) {
    for (std::size_t i = 0; i < links.size(); ++i) {
      if (links[i])
        talks_.push_back({.node_rank = i, .rank = node[i].value, .socket = links[i].get()});
    }
  }

  bool alone() const { return talks_.empty(); }

  /// Throws what makes the exchange unusable; failures that leave it in step come from result().
  void run(std::span<const physical_memory* const> mine, share_kind transport,
           std::chrono::milliseconds timeout) {
    const auto deadline = clock::now() + timeout;
    try {
      packets_ = handles_message(sequence_, mine, transport);
    } catch (...) {
      failure_ = std::current_exception();
      packets_.clear();
      packets_.push_back(error_message(message_kind::failure, sequence_, describe_error(failure_)));
    }
    std::vector<pollfd> ready;
    for (bool crowded = false;;) {
      ready.clear();
      for (const auto& talk : talks_) {
        const bool to_say = talk.sent < packets_.size() && !crowded;
        ready.push_back({talk.socket,
                         static_cast<short>((talk.heard ? 0 : POLLIN) | (to_say ? POLLOUT : 0)),
                         0});
        // poll() reports a hang-up unasked; one by a peer that has said all ends the next exchange.
        if (ready.back().events == 0) ready.back().fd = -1;
      }
      const auto missing = unfinished();
      if (missing.empty()) return;
      if (clock::now() >= deadline) {
        throw timed_out(not_arrived("an exchange of handles", missing, timeout));
      }
      wait_ready(ready, deadline, std::chrono::milliseconds(crowded ? 1 : 3'600'000));
      crowded = false;
      for (std::size_t i = 0; i < talks_.size(); ++i) {
        if ((ready[i].revents & (POLLIN | POLLHUP | POLLERR)) != 0) listen(talks_[i]);
        // A peer that has heard all from here may leave; one that has not will never.
        const bool spoken = talks_[i].sent == packets_.size();
        if ((ready[i].revents & POLLHUP) != 0 && talks_[i].heard && !spoken) throw_gone(talks_[i]);
        // The socket may have room while the user has too many descriptors under way.
        if ((ready[i].revents & POLLOUT) != 0 && !speak(talks_[i])) crowded = true;
      }
    }
  }

  memory_lists result() {
    if (failure_ != nullptr) std::rethrow_exception(failure_);
    if (!failed_.empty()) {
      const auto& [rank, why] = *failed_.begin();
      throw peer_error(fmt::format("rank {} could not share its memory: {}{}", rank, why.message,
                                   failed_.size() == 1 ? std::string()
                                                       : fmt::format(" (and {} more ranks failed)",
                                                                     failed_.size() - 1)),
                       why.help, why.native_code);
    }
    return std::move(imported_);
  }

 private:
  std::vector<int> unfinished() const {
    std::vector<int> ranks;
    for (const auto& talk : talks_) {
      if (!talk.heard || talk.sent < packets_.size()) ranks.push_back(talk.rank);
    }
    return ranks;
  }

  /// Sends what the socket takes. False when it took nothing.
  bool speak(talk& to) {
    const auto before = to.sent;
    while (to.sent < packets_.size()) {
      const auto& packet = packets_[to.sent];
      std::vector<int> fds;
      for (const auto& fd : packet.fds) fds.push_back(fd.get());
      const auto outcome = send_packet(to.socket, packet.bytes, fds);
      if (outcome == transfer::closed) throw_gone(to);
      if (outcome == transfer::not_now) break;
      ++to.sent;
    }
    return to.sent > before;
  }

  void listen(talk& from) {
    while (!from.heard) {
      auto packet = receive_packet(from.socket);
      if (packet.result == transfer::not_now) return;
      if (packet.result == transfer::closed) throw_gone(from);
      take(from, packet);
    }
  }

  void take(talk& from, received_packet& packet) {
    const auto sender = fmt::format("rank {}", from.rank);
    auto read = read_packet(packet, sender);
    const auto& header = read.header;
    if (header.kind == message_kind::lost) throw_error(read.why.category, std::move(read.why.info));
    if (header.sequence != sequence_) {
      throw peer_error(fmt::format("{} is in exchange {} of handles, this rank in exchange {}",
                                   sender, header.sequence, sequence_),
                       "the ranks of a node must make the same calls in the same order");
    }
    if (header.kind == message_kind::failure) {
      failed_.emplace(from.rank, std::move(read.why.info));
      from.heard = true;
      return;
    }
    if (header.first != from.received) {
      throw peer_error(fmt::format("{} sent handle {} where handle {} was due", sender,
                                   header.first, from.received));
    }
    from.received += header.count;
    from.heard = from.received == header.total;
    // One failure is enough to report; after it, descriptors are closed as they come.
    if (failure_ != nullptr) return;
    try {
      if (packet.fds_lost) {
        throw driver_error(
            fmt::format("descriptors from {} were lost: too many open files", sender),
            "raise the limit of open files (ulimit -n)", EMFILE);
      }
      import(read.handles, packet.fds, imported_[from.node_rank]);
    } catch (...) {
      failure_ = std::current_exception();
    }
  }

  void import(std::span<const wire_handle> handles, std::span<const unique_fd> fds,
              std::vector<physical_memory>& into) {
    std::size_t next = 0;
    for (const auto& handle : handles) {
      const auto request = handle.request();
      into.push_back(request.share == share_kind::fd
                         ? physical_memory::import_fd(on_, fds[next++].get(), request)
                         : physical_memory::import_fabric(on_, handle.fabric, request));
    }
  }

  /// For a connection that the peer has closed. What it said before tells who is to blame: a rank
  /// that gives up because it lost another names that one.
  [[noreturn]] static void throw_gone(const talk& peer) {
    const auto sender = fmt::format("rank {}", peer.rank);
    for (auto packet = receive_packet(peer.socket); packet.result == transfer::done;
         packet = receive_packet(peer.socket)) {
      auto read = read_packet(packet, sender);
      if (read.header.kind == message_kind::lost) {
        throw_error(read.why.category, std::move(read.why.info));
      }
    }
    throw peer_error(sender + " closed its connection during an exchange of handles",
                     "it ended, or gave up; see its log");
  }

  driver& on_;
  std::uint64_t sequence_;
  std::vector<talk> talks_;
  std::vector<outgoing_packet> packets_;  ///< the same for every peer
  memory_lists imported_;
  std::exception_ptr failure_;        ///< of this rank
  std::map<int, error_info> failed_;  ///< peers that had nothing to share, and why
};

}  // namespace

struct handle_exchange::state {
  std::shared_ptr<bootstrap> ranks;
  std::shared_ptr<driver> on;
  share_kind transport = share_kind::fd;
  std::vector<unique_fd> links;  ///< by node rank; none to itself
  std::uint64_t sequence = 0;
  std::string broken_by;  ///< empty while all peers are there

  /// Peers that still wait learn at once what happened, from this rank rather than by their clock.
  void give_up(const wire_error& why) noexcept {
    log_failure("telling peers of a lost exchange", [&] {
      broken_by = why.info.message;
      const auto last_words = error_message(message_kind::lost, sequence, why);
      for (const auto& link : links) {
        if (link) static_cast<void>(send_packet(link.get(), last_words.bytes));
      }
    });
    links.clear();
  }
};

handle_exchange::handle_exchange(std::shared_ptr<bootstrap> ranks, std::shared_ptr<driver> on)
    : state_(std::make_unique<state>()) {
  if (ranks == nullptr) throw invalid_argument("a handle exchange without a bootstrap");
  state_->ranks = std::move(ranks);
  state_->on = std::move(on);
  auto& job = *state_->ranks;

  std::exception_ptr failure;
  announcement mine;
  listening_socket listening;
  job_secret secret{};
  try {
    if (state_->on == nullptr) throw invalid_argument("a handle exchange without a driver");
    const auto info = state_->on->info();
    if (!info.fd_sharing) {
      throw unsupported(fmt::format("the {} driver cannot share memory by descriptor", info.name));
    }
    listening = listen_locally();
    mine = {{job.rank().value, own_credentials(), listening.name},
            info.fabric_sharing ? 1U : 0U,
            static_cast<std::uint32_t>(info.kind)};
    if (job.rank().value == 0) fill_random(secret);
  } catch (...) {
    failure = std::current_exception();
  }
  job.agree(failure, "handle exchange: listen");
  const auto shared = job.broadcast(secret, rank_id{0}, "handle exchange: secret");
  if (shared.size() != secret.size()) throw peer_error("rank 0 sent no secret");
  std::copy(shared.begin(), shared.end(), secret.begin());
  const auto everyone = job.all_gather_value(mine, "handle exchange: announce");

  require_alike(job, everyone);

  std::vector<endpoint> node;
  bool fabric = true;
  for (const auto& rank : job.node_ranks()) {
    const auto& announced = everyone[static_cast<std::size_t>(rank.value)];
    node.push_back(announced.where);
    fabric = fabric && announced.fabric != 0;
  }
  if (fabric) state_->transport = share_kind::fabric;
  const auto patience = time_for_a_part(job);
  try {
    state_->links = connect_node(listening, node, static_cast<std::size_t>(job.node_rank()), secret,
                                 clock::now() + patience, patience);
  } catch (...) {
    failure = std::current_exception();
  }
  job.agree(failure, "handle exchange: connect");
}

handle_exchange::handle_exchange(handle_exchange&&) noexcept = default;
handle_exchange& handle_exchange::operator=(handle_exchange&&) noexcept = default;
handle_exchange::~handle_exchange() = default;

std::vector<std::vector<physical_memory>> handle_exchange::exchange(
    std::span<const physical_memory* const> mine) {
  auto& self = *state_;
  if (!self.broken_by.empty()) {
    throw peer_error("handles cannot be exchanged any more: " + self.broken_by,
                     "make a new handle_exchange, without the ranks that were lost");
  }
  const auto& node = self.ranks->node_ranks();
  conversation now(*self.on, self.links, node, ++self.sequence, node.size());
  if (now.alone()) return memory_lists(node.size());
  try {
    now.run(mine, self.transport, time_for_a_part(*self.ranks));
  } catch (...) {
    self.give_up(describe_error(std::current_exception()));
    throw;
  }
  return now.result();
}

share_kind handle_exchange::transport() const noexcept {
  return state_->transport;
}

}  // namespace evmm
