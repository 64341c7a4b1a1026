// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/error.hpp>
#include <evmm/types.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

struct ompi_communicator_t;  // MPI_Comm of Open MPI points to one

namespace [[gnu::visibility("default")]] evmm {

/// How ranks find each other and agree before they share memory. One primitive, all_gather, is all
/// that an implementation gives; the rest is built on it, here.
///
/// Threads: one thread at a time, the same one on each rank's side of a call. Streams: none.
/// Order: all ranks make the same calls in the same order.
/// Errors: each blocking step has a deadline. When it passes, every rank that is still there
///   throws timed_out naming the ranks that did not arrive, and the bootstrap is broken: later
///   calls throw peer_error at once instead of hanging.
class bootstrap {
 public:
  using milliseconds = std::chrono::milliseconds;

  bootstrap(const bootstrap&) = delete;
  bootstrap& operator=(const bootstrap&) = delete;
  virtual ~bootstrap() = default;

  rank_id rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }

  /// Deadline of each step; 30 s unless EVMM_TIMEOUT_MS or set_timeout says otherwise.
  milliseconds timeout() const noexcept { return timeout_; }
  void set_timeout(milliseconds timeout);

  /// Every rank's bytes, by rank; lengths may differ. Collective.
  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> mine,
                                                 std::string_view step = "all_gather");
  /// Returns when all ranks have called it.
  void barrier(std::string_view step = "barrier");
  /// The root's bytes on every rank.
  std::vector<std::byte> broadcast(std::span<const std::byte> bytes, rank_id root,
                                   std::string_view step = "broadcast");
  /// All ranks return, or all throw the same error: the one of the lowest failing rank, of its own
  /// class, its message led by "rank N:" and by how many others failed. `mine` is this rank's
  /// failure or null; an exception that is not an evmm::error counts as driver_error.
  void agree(std::exception_ptr mine, std::string_view step = "agree");

  /// Typed all_gather of one trivially copyable value.
  template <class T>
  std::vector<T> all_gather_value(const T& mine, std::string_view step = "all_gather");

  // --- nodes: ranks that run under one operating system and can pass descriptors to each other.

  /// Node of each rank, numbered from 0 in order of their lowest rank. Collective at the first
  /// call (the constructor of each implementation makes it).
  const std::vector<int>& nodes() const noexcept { return nodes_; }
  int node() const noexcept { return nodes_[static_cast<std::size_t>(rank_.value)]; }
  int node_count() const noexcept { return node_count_; }
  /// Ranks of this node, ascending.
  const std::vector<rank_id>& node_ranks() const noexcept { return node_ranks_; }
  /// This rank's index in node_ranks().
  int node_rank() const noexcept { return node_rank_; }

 protected:
  bootstrap(rank_id rank, int size);

  /// The primitive. Returns every rank's bytes, by rank, before `deadline`; else throws timed_out
  /// naming the ranks that did not arrive, or peer_error.
  virtual std::vector<std::vector<std::byte>> gather(std::span<const std::byte> mine,
                                                     std::chrono::steady_clock::time_point deadline,
                                                     std::string_view step) = 0;

  /// Finds out who shares the node; implementations call it at the end of construction, with an
  /// identity that replaces the host's where a test pretends to be several hosts.
  void find_nodes(std::string identity = host_identity());

 private:
  rank_id rank_;
  int size_;
  milliseconds timeout_;
  bool broken_ = false;
  std::string broken_by_;
  std::vector<int> nodes_;
  int node_count_ = 1;
  std::vector<rank_id> node_ranks_;
  int node_rank_ = 0;

 public:
  /// What tells one operating system's descriptor space from another's: the kernel's boot id and
  /// the network namespace (abstract sockets do not cross it), never the host name alone.
  static std::string host_identity();
};

/// Over MPI: on a duplicate of `communicator`, or of MPI_COMM_WORLD when null. Initialises MPI when
/// nobody has, and then finalises it at exit. Throws unsupported when built without MPI.
std::shared_ptr<bootstrap> make_mpi_bootstrap(ompi_communicator_t* communicator = nullptr);

/// A key-value store that all ranks see: torch.distributed's TCPStore, Redis, etcd, a directory.
struct key_value_store {
  /// Publishes a value; each key is set once.
  std::function<void(const std::string& key, std::span<const std::byte> value)> set;
  /// The value, or nullopt if it is not there within the wait. Called again until the deadline.
  std::function<std::optional<std::vector<std::byte>>(const std::string& key,
                                                      std::chrono::milliseconds wait)>
      get;
  /// Removes a key nobody will ask for again. May be empty.
  std::function<void(const std::string& key)> erase = {};
};
/// Over a store; `job` keeps the keys of jobs that share one apart.
std::shared_ptr<bootstrap> make_store_bootstrap(rank_id rank, int size, key_value_store store,
                                                std::string job = "evmm");

/// Over a callback that gathers every rank's bytes (of lengths that may differ), by rank.
using all_gather_function =
    std::function<std::vector<std::vector<std::byte>>(std::span<const std::byte> mine)>;
/// The callback owns the waiting: the deadline is checked only when it returns.
std::shared_ptr<bootstrap> make_callback_bootstrap(rank_id rank, int size,
                                                   all_gather_function gather);

/// Ranks that are threads of one process, one bootstrap each. Give each thread its own;
/// construction does not block, the first collective call does. `hosts`, when given, names the
/// pretended host of each rank.
std::vector<std::shared_ptr<bootstrap>> make_thread_bootstraps(int size,
                                                               std::vector<std::string> hosts = {});

template <class T>
std::vector<T> bootstrap::all_gather_value(const T& mine, std::string_view step) {
  static_assert(std::is_trivially_copyable_v<T>);
  const auto gathered = all_gather(std::as_bytes(std::span{&mine, 1}), step);
  std::vector<T> values(gathered.size());
  for (std::size_t i = 0; i < gathered.size(); ++i) {
    if (gathered[i].size() != sizeof(T)) {
      throw peer_error("rank " + std::to_string(i) + " sent " + std::to_string(gathered[i].size()) +
                       " bytes in " + std::string(step) + ", expected " +
                       std::to_string(sizeof(T)));
    }
    std::copy(gathered[i].begin(), gathered[i].end(),
              std::as_writable_bytes(std::span{&values[i], 1}).begin());
  }
  return values;
}

}  // namespace evmm
