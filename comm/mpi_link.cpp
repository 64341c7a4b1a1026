// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi_link.hpp"

#include "comm/collective_change.hpp"
#include "comm/mpi_calls.hpp"

#include <evmm/error.hpp>

#include <climits>
#include <fmt/format.h>

#include <map>

namespace evmm {

namespace {

constexpr int k_tag = 0;

const char* level_name(int level) {
  switch (level) {
    case MPI_THREAD_SINGLE:
      return "MPI_THREAD_SINGLE";
    case MPI_THREAD_FUNNELED:
      return "MPI_THREAD_FUNNELED";
    case MPI_THREAD_SERIALIZED:
      return "MPI_THREAD_SERIALIZED";
    default:
      return "MPI_THREAD_MULTIPLE";
  }
}

/// Between this library's calls and the program's own no lock could stand: MPI must bear both.
void check_threads() {
  int level = MPI_THREAD_SINGLE;
  mpi::check(MPI_Query_thread(&level), "MPI_Query_thread");
  if (level >= MPI_THREAD_MULTIPLE) return;
  throw unsupported(
      fmt::format("MPI was initialised with {}, and messages to other nodes are moved by a thread "
                  "of their own",
                  level_name(level)),
      "call MPI_Init_thread with MPI_THREAD_MULTIPLE, or leave it to make_mpi_bootstrap");
}

class mpi_link final : public node_link {
 public:
  mpi_link(MPI_Comm parent, std::chrono::milliseconds timeout)
      : communicator_(mpi::duplicate(parent, timeout)) {}

  /// Local in Open MPI, which gives a communicator's number to the next, and with it messages that
  /// come late: one with any under way is left to the process.
  ~mpi_link() override {
    if (!mpi::usable()) return;
    if (!requests_.empty()) {
      mpi::mark_lost();
    } else if (!left_behind()) {
      MPI_Comm_free(&communicator_);
    }
  }

  std::string name() const override { return "mpi"; }

  transfer send(rank_id to, std::span<const std::byte> message) override {
    if (message.size() > INT_MAX) throw invalid_argument("MPI takes at most 2 GiB a message");
    const auto held = call();
    const auto made = next();
    mpi::check(MPI_Isend(message.data(), static_cast<int>(message.size()), MPI_BYTE, to.value,
                         k_tag, communicator_, &requests_[made]),
               "MPI_Isend");
    return made;
  }

  std::optional<arrival> probe() override {
    const mpi::thread_call held;
    if (!held) return std::nullopt;
    int found = 0;
    int bytes = 0;
    MPI_Status status;
    mpi::check(MPI_Improbe(MPI_ANY_SOURCE, k_tag, communicator_, &found, &probed_, &status),
               "MPI_Improbe");
    if (found == 0) return std::nullopt;
    mpi::check(MPI_Get_count(&status, MPI_BYTE, &bytes), "MPI_Get_count");
    return arrival{{status.MPI_SOURCE}, static_cast<std::size_t>(bytes)};
  }

  transfer receive(std::span<std::byte> into) override {
    const auto held = call();
    const auto made = next();
    mpi::check(MPI_Imrecv(into.data(), static_cast<int>(into.size()), MPI_BYTE, &probed_,
                          &requests_[made]),
               "MPI_Imrecv");
    return made;
  }

  bool done(transfer which) override {
    const auto held = call();
    const auto found = requests_.find(which);
    int over = 0;
    mpi::check(MPI_Test(&found->second, &over, MPI_STATUS_IGNORE), "MPI_Test");
    if (over != 0) requests_.erase(found);
    return over != 0;
  }

 private:
  static mpi::thread_call call() {
    mpi::thread_call held;
    if (held) return held;
    throw invalid_argument("MPI is finalised already", "close channels before MPI_Finalize");
  }
  transfer next() {
    const auto made = static_cast<transfer>(next_++);
    requests_.emplace(made, MPI_REQUEST_NULL);
    return made;
  }

  MPI_Comm communicator_;
  MPI_Message probed_ = MPI_MESSAGE_NULL;
  std::map<transfer, MPI_Request> requests_;
  std::uint64_t next_ = 0;
};

}  // namespace

std::shared_ptr<node_link> make_mpi_link(bootstrap& ranks, MPI_Comm communicator) {
  agree_on(ranks, "make_link: threads of MPI", check_threads);
  std::shared_ptr<node_link> made;
  agree_on(ranks, "make_link: communicator", [&] {
    mpi::watch_finalize();
    made = std::make_shared<mpi_link>(communicator, ranks.timeout() / 2);
  });
  return made;
}

}  // namespace evmm
