// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi_calls.hpp"
#include "comm/mpi_link.hpp"
#include "comm/ranks_text.hpp"
#include "comm/wire.hpp"
#include "lib/support/log.hpp"
#include "lib/support/patience.hpp"

#include <evmm/comm/bootstrap.hpp>

#include <climits>
#include <fmt/format.h>

#include <mutex>
#include <utility>

namespace evmm {

namespace {

using clock = std::chrono::steady_clock;

/// A rank can be one step ahead of another, never two: two tags keep their messages apart.
constexpr int k_step_tag = 0;  // and 1
constexpr int k_lost_tag = 2;

/// The requests of one step and the memory that they read and write.
struct step_requests {
  byte_vector outgoing;
  std::vector<byte_vector> incoming;
  std::vector<MPI_Request> requests;
  std::vector<int> peers;  ///< whom each request is with

  bool test() {
    int done = 0;
    mpi::check(
        MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done, MPI_STATUSES_IGNORE),
        "MPI_Testall");
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

/// Every rank sends to every other: one hop, and each sees for itself who has not come.
class mpi_bootstrap final : public bootstrap {
 public:
  explicit mpi_bootstrap(MPI_Comm parent)
      : bootstrap(rank_id{mpi::rank_in(parent)}, mpi::size_of(parent)),
        communicator_(mpi::duplicate(parent, timeout())) {
    find_nodes();
  }

  /// Local in Open MPI, although the standard lets it be collective.
  ~mpi_bootstrap() override {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized == 0 && !broken()) MPI_Comm_free(&communicator_);
  }

  std::shared_ptr<node_link> make_link() override { return make_mpi_link(*this, communicator_); }

 private:
  std::vector<byte_vector> gather(std::span<const std::byte> mine, clock::time_point deadline,
                                  std::string_view step) override {
    if (mine.size() > INT_MAX) throw invalid_argument("MPI takes at most 2 GiB a message");
    auto now = std::make_unique<step_requests>();
    try {
      gather_into(*now, mine, deadline, step);
    } catch (...) {
      mpi::mark_lost();
      park(std::move(now));
      throw;
    }
    return std::move(now->incoming);
  }

  void gather_into(step_requests& now, std::span<const std::byte> mine, clock::time_point deadline,
                   std::string_view step) {
    throw_if_lost();  // the others may have waited for this rank long enough
    const int tag = k_step_tag + static_cast<int>(step_++ % 2);
    now.outgoing.assign(mine.begin(), mine.end());
    now.incoming.resize(static_cast<std::size_t>(size()));
    now.incoming[static_cast<std::size_t>(rank().value)] = now.outgoing;
    for (int i = 1; i < size(); ++i) send(now, (rank().value + i) % size(), tag);

    std::vector<bool> arrived(static_cast<std::size_t>(size()));
    arrived[static_cast<std::size_t>(rank().value)] = true;
    int awaited = size() - 1;
    patience wait;
    while (awaited > 0 || !now.test()) {
      if (const int from = awaited > 0 ? receive(now, tag) : -1; from >= 0) {
        arrived[static_cast<std::size_t>(from)] = true;
        --awaited;
        wait.renew();
        continue;
      }
      throw_if_lost();
      if (clock::now() >= deadline) {
        std::vector<int> missing;
        for (int r = 0; r < size(); ++r) {
          if (!arrived[static_cast<std::size_t>(r)]) missing.push_back(r);
        }
        give_up(not_arrived(step, missing.empty() ? now.unfinished() : missing, timeout()));
      }
      wait.spend();
    }
  }

  void send(step_requests& now, int to, int tag) {
    now.peers.push_back(to);
    mpi::check(MPI_Isend(now.outgoing.data(), static_cast<int>(now.outgoing.size()), MPI_BYTE, to,
                         tag, communicator_, &now.requests.emplace_back(MPI_REQUEST_NULL)),
               "MPI_Isend");
  }

  /// Starts to receive one message that has come; returns its sender, or -1.
  int receive(step_requests& now, int tag) {
    int found = 0;
    int bytes = 0;
    MPI_Message message = MPI_MESSAGE_NULL;
    MPI_Status status;
    mpi::check(MPI_Improbe(MPI_ANY_SOURCE, tag, communicator_, &found, &message, &status),
               "MPI_Improbe");
    if (found == 0) return -1;
    mpi::check(MPI_Get_count(&status, MPI_BYTE, &bytes), "MPI_Get_count");
    auto& into = now.incoming[static_cast<std::size_t>(status.MPI_SOURCE)];
    into.resize(static_cast<std::size_t>(bytes));
    now.peers.push_back(status.MPI_SOURCE);
    mpi::check(MPI_Imrecv(into.data(), bytes, MPI_BYTE, &message,
                          &now.requests.emplace_back(MPI_REQUEST_NULL)),
               "MPI_Imrecv");
    return status.MPI_SOURCE;
  }

  /// Throws what another rank threw when it gave up.
  void throw_if_lost() {
    int found = 0;
    int bytes = 0;
    MPI_Message message = MPI_MESSAGE_NULL;
    MPI_Status status;
    mpi::check(MPI_Improbe(MPI_ANY_SOURCE, k_lost_tag, communicator_, &found, &message, &status),
               "MPI_Improbe");
    if (found == 0) return;
    mpi::check(MPI_Get_count(&status, MPI_BYTE, &bytes), "MPI_Get_count");
    byte_vector text(static_cast<std::size_t>(bytes));
    mpi::check(MPI_Mrecv(text.data(), bytes, MPI_BYTE, &message, MPI_STATUS_IGNORE), "MPI_Mrecv");
    wire_reader in(text, fmt::format("rank {}", status.MPI_SOURCE));
    auto why = get_error(in);
    throw_error(why.category, std::move(why.info));
  }

  /// Tells all others, also those that come late, and throws.
  [[noreturn]] void give_up(error_info why) {
    log_failure("telling other ranks of a lost step", [&] {
      wire_writer out;
      put_error(out, error_category::timed_out, why);
      auto last_words = std::make_unique<step_requests>();
      last_words->outgoing = out.take();
      for (int i = 1; i < size(); ++i) {
        send(*last_words, (rank().value + i) % size(), k_lost_tag);
      }
      if (!last_words->test()) park(std::move(last_words));
    });
    throw timed_out(std::move(why));
  }

  MPI_Comm communicator_;
  std::uint64_t step_ = 0;
};

}  // namespace

std::shared_ptr<bootstrap> make_mpi_bootstrap(ompi_communicator_t* communicator) {
  mpi::initialize();
  return std::make_shared<mpi_bootstrap>(communicator == nullptr ? MPI_COMM_WORLD : communicator);
}

}  // namespace evmm
