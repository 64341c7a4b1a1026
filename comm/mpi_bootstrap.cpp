// SPDX-License-Identifier: Apache-2.0
#include "comm/gather_plan.hpp"
#include "comm/mpi_calls.hpp"
#include "comm/mpi_link.hpp"
#include "comm/ranks_text.hpp"
#include "comm/wire.hpp"
#include "lib/support/log.hpp"
#include "lib/support/patience.hpp"

#include <evmm/comm/bootstrap.hpp>

#include <climits>
#include <fmt/format.h>

#include <algorithm>
#include <list>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace evmm {

namespace {

using clock = std::chrono::steady_clock;

/// A rank can be one step ahead of another, never two: two sets of tags keep their messages apart.
constexpr int k_round_tag = 0;  // to 63: a step has at most 32 rounds
constexpr int k_lost_tag = 64;
constexpr int k_ask_tag = 65;
constexpr int k_here_tag = 66;

/// The requests of one step and the memory that they read and write.
struct step_requests {
  std::list<byte_vector> messages;
  std::vector<MPI_Request> requests;
  std::vector<int> peers;  ///< whom each request is with

  bool test() {
    int done = 0;
    mpi::check(
        MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done, MPI_STATUSES_IGNORE),
        "MPI_Testall");
    return done != 0;
  }
  /// Whether the latest request, a receive, is over.
  bool received() {
    int done = 0;
    mpi::check(MPI_Test(&requests.back(), &done, MPI_STATUS_IGNORE), "MPI_Test");
    return done != 0;
  }
  std::vector<int> unfinished() const {
    std::vector<int> ranks;
    for (std::size_t i = 0; i < requests.size(); ++i) {
      if (requests[i] != MPI_REQUEST_NULL) ranks.push_back(peers[i]);
    }
    return ranks;
  }
};

/// MPI may still read and write the memory of requests that never finished, and cancels neither
/// sends nor matched receives: such memory stays until the process ends.
void park(std::unique_ptr<step_requests> abandoned) {
  static std::mutex mutex;
  static auto* const parked = new std::vector<std::unique_ptr<step_requests>>;
  const std::lock_guard lock(mutex);
  parked->push_back(std::move(abandoned));
}

/// What one rank has of a step.
struct gathered_blocks {
  std::vector<std::optional<byte_vector>> by_rank;

  std::vector<int> missing() const {
    std::vector<int> ranks;
    for (std::size_t r = 0; r < by_rank.size(); ++r) {
      if (!by_rank[r]) ranks.push_back(static_cast<int>(r));
    }
    return ranks;
  }
};

class mpi_bootstrap final : public bootstrap {
 public:
  explicit mpi_bootstrap(MPI_Comm parent)
      : bootstrap(rank_id{mpi::rank_in(parent)}, mpi::size_of(parent)),
        communicator_(mpi::duplicate(parent, timeout())) {
    find_nodes();
  }

  /// Local in Open MPI, although the standard lets it be collective.
  ~mpi_bootstrap() override {
    if (mpi::usable() && !broken()) MPI_Comm_free(&communicator_);
  }

  std::shared_ptr<node_link> make_link() override { return make_mpi_link(*this, communicator_); }

 private:
  std::vector<byte_vector> gather(std::span<const std::byte> mine, clock::time_point deadline,
                                  std::string_view step) override {
    auto now = std::make_unique<step_requests>();
    gathered_blocks blocks{
        std::vector<std::optional<byte_vector>>(static_cast<std::size_t>(size()))};
    blocks.by_rank[static_cast<std::size_t>(rank().value)].emplace(mine.begin(), mine.end());
    try {
      gather_into(*now, blocks, deadline, step);
    } catch (...) {
      if (!std::exchange(told_, true)) tell(describe_error(std::current_exception()));
      mpi::mark_lost();
      park(std::move(now));
      throw;
    }
    std::vector<byte_vector> gathered;
    for (auto& block : blocks.by_rank) gathered.push_back(std::move(*block));
    return gathered;
  }

  void gather_into(step_requests& now, gathered_blocks& blocks, clock::time_point deadline,
                   std::string_view step) {
    throw_if_lost();  // the others may have waited for this rank long enough
    const gather_plan plan{size()};
    const int first_tag = k_round_tag + 32 * static_cast<int>(step_++ % 2);
    for (int round = 0; round < plan.rounds(); ++round) {
      const int tag = first_tag + round;
      send(now, plan.receiver(rank().value, round), tag, pack(blocks, plan.blocks(round)));
      const int sender = plan.sender(rank().value, round);
      const byte_vector* come = nullptr;
      await(now, blocks, sender, deadline, step, [&] {
        if (come == nullptr) come = receive(now, sender, tag);
        // Sends may go on; what was received last has to be there.
        return come != nullptr && now.received();
      });
      unpack(blocks, sender, plan.blocks(round), *come);
    }
    await(now, blocks, -1, deadline, step, [&] { return now.test(); });
  }

  /// This rank's block and those of the ranks ahead of it.
  byte_vector pack(const gathered_blocks& blocks, int count) const {
    wire_writer out;
    for (int i = 0; i < count; ++i) {
      const auto& block = *blocks.by_rank[static_cast<std::size_t>((rank().value + i) % size())];
      out.put(block.size()).append(block);
    }
    return out.take();
  }
  void unpack(gathered_blocks& blocks, int sender, int count, const byte_vector& message) const {
    wire_reader in(message, fmt::format("rank {}", sender));
    for (int i = 0; i < count; ++i) {
      const auto block = in.get_bytes(in.get<std::size_t>());
      blocks.by_rank[static_cast<std::size_t>((sender + i) % size())].emplace(block.begin(),
                                                                              block.end());
    }
  }

  /// Waits until `ready`, and tells ranks that ask that this one is here. Past the deadline finds
  /// out who is missing, tells all and throws. `sender` is who must send next, -1 for none.
  template <class Ready>
  void await(step_requests& now, const gathered_blocks& blocks, int sender,
             clock::time_point deadline, std::string_view step, Ready&& ready) {
    constexpr unsigned rarely = 16;  // each look for another message costs as much as the one meant
    patience wait;
    for (unsigned turn = 1; !ready(); ++turn, wait.spend()) {
      if (turn % rarely != 0) continue;
      throw_if_lost();
      answer_those_who_ask();
      if (clock::now() < deadline) continue;
      auto late = sender < 0 ? now.unfinished() : blocks.missing();
      // A rank behind the one that is lost has nothing to say before that one's neighbours have
      // found out; then they tell it.
      const bool beside = sender < 0 || !silent({sender}).empty();
      if (!beside) listen(4 * grace());
      auto lost = silent(late);
      throw timed_out(not_arrived(step, lost.empty() ? late : lost, timeout()));
    }
  }

  /// How long a rank that waits in a step may take to say so: on a machine with more ranks than
  /// cores one does not run at once.
  milliseconds grace() const {
    return std::clamp(timeout() / 8, milliseconds(200), milliseconds(1000));
  }

  /// Those of `ranks` that do not say that they are in a step. Answers others meanwhile, and throws
  /// what another rank found out first.
  std::vector<int> silent(std::vector<int> ranks) {
    auto asked = std::make_unique<step_requests>();
    for (const int r : ranks) send(*asked, r, k_ask_tag, {});
    const auto until = clock::now() + grace();
    for (patience wait; !ranks.empty() && clock::now() < until; wait.spend()) {
      throw_if_lost();
      answer_those_who_ask();
      for (MPI_Status status; take(MPI_ANY_SOURCE, k_here_tag, &status);) {
        std::erase(ranks, status.MPI_SOURCE);
      }
    }
    if (!asked->test()) park(std::move(asked));
    return ranks;
  }

  void listen(milliseconds how_long) {
    const auto until = clock::now() + how_long;
    for (patience wait; clock::now() < until; wait.spend()) {
      throw_if_lost();
      answer_those_who_ask();
    }
  }

  void answer_those_who_ask() {
    for (MPI_Status status; take(MPI_ANY_SOURCE, k_ask_tag, &status);) {
      auto answer = std::make_unique<step_requests>();
      send(*answer, status.MPI_SOURCE, k_here_tag, {});
      if (!answer->test()) park(std::move(answer));
    }
  }

  void send(step_requests& now, int to, int tag, byte_vector message) {
    if (message.size() > INT_MAX) {
      throw invalid_argument(
          fmt::format("a message of {} bytes, with what other ranks gave: MPI takes up to {}",
                      message.size(), INT_MAX),
          "gather less at a time");
    }
    const byte_vector& kept = now.messages.emplace_back(std::move(message));
    now.peers.push_back(to);
    mpi::check(MPI_Isend(kept.data(), static_cast<int>(kept.size()), MPI_BYTE, to, tag,
                         communicator_, &now.requests.emplace_back(MPI_REQUEST_NULL)),
               "MPI_Isend");
  }

  /// Starts to receive a message that has come; null when none has.
  const byte_vector* receive(step_requests& now, int from, int tag) {
    int found = 0;
    int bytes = 0;
    MPI_Message message = MPI_MESSAGE_NULL;
    MPI_Status status;
    mpi::check(MPI_Improbe(from, tag, communicator_, &found, &message, &status), "MPI_Improbe");
    if (found == 0) return nullptr;
    mpi::check(MPI_Get_count(&status, MPI_BYTE, &bytes), "MPI_Get_count");
    byte_vector& into = now.messages.emplace_back(static_cast<std::size_t>(bytes));
    now.peers.push_back(from);
    mpi::check(MPI_Imrecv(into.data(), bytes, MPI_BYTE, &message,
                          &now.requests.emplace_back(MPI_REQUEST_NULL)),
               "MPI_Imrecv");
    return &into;
  }

  /// Takes one whole message that has come, if one has.
  std::optional<byte_vector> take(int from, int tag, MPI_Status* status) {
    int found = 0;
    int bytes = 0;
    MPI_Message message = MPI_MESSAGE_NULL;
    mpi::check(MPI_Improbe(from, tag, communicator_, &found, &message, status), "MPI_Improbe");
    if (found == 0) return std::nullopt;
    mpi::check(MPI_Get_count(status, MPI_BYTE, &bytes), "MPI_Get_count");
    byte_vector text(static_cast<std::size_t>(bytes));
    mpi::check(MPI_Mrecv(text.data(), bytes, MPI_BYTE, &message, MPI_STATUS_IGNORE), "MPI_Mrecv");
    return text;
  }

  /// Throws what another rank threw when it gave up.
  void throw_if_lost() {
    MPI_Status status;
    const auto text = take(MPI_ANY_SOURCE, k_lost_tag, &status);
    if (!text) return;
    told_ = true;
    wire_reader in(*text, fmt::format("rank {}", status.MPI_SOURCE));
    auto why = get_error(in);
    throw_error(why.category, std::move(why.info));
  }

  /// All others throw the same, also those that come late.
  void tell(const wire_error& why) noexcept {
    log_failure("telling other ranks of a lost step", [&] {
      wire_writer out;
      put_error(out, why.category, why.info);
      auto last_words = std::make_unique<step_requests>();
      const byte_vector text = out.take();
      for (int i = 1; i < size(); ++i) {
        send(*last_words, (rank().value + i) % size(), k_lost_tag, text);
      }
      if (!last_words->test()) park(std::move(last_words));
    });
  }

  MPI_Comm communicator_;
  std::uint64_t step_ = 0;
  bool told_ = false;  ///< why a step was lost, by this rank or to it
};

}  // namespace

std::shared_ptr<bootstrap> make_mpi_bootstrap(ompi_communicator_t* communicator) {
  mpi::initialize();
  return std::make_shared<mpi_bootstrap>(communicator == nullptr ? MPI_COMM_WORLD : communicator);
}

}  // namespace evmm
