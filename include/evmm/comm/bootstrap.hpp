// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/error.hpp>
#include <evmm/types.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
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

class node_link;

/// How ranks find each other and agree before they share memory. One primitive, all_gather, is all
/// that an implementation gives; the rest is built on it, here.
///
/// Threads: one thread at a time, the same one on each rank's side of a call. Streams: none.
/// Order: all ranks make the same calls in the same order.
/// Errors: each blocking step has a deadline. When it passes, every rank that is still there
///   throws timed_out naming the ranks that did not arrive, and the bootstrap is broken: later
///   calls throw peer_error at once instead of hanging. Ranks that make different calls all throw
///   the same peer_error naming the ranks and their steps; that alone breaks nothing.
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
  /// Whether an earlier step was lost, so that every further call throws.
  bool broken() const noexcept { return !broken_by_.empty(); }

  /// Every rank's bytes, by rank; lengths may differ. Collective.
  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> mine,
                                                 std::string_view step = "all_gather");
  /// Returns when all ranks have called it.
  void barrier(std::string_view step = "barrier");
  /// The root's bytes on every rank; what the others pass is ignored.
  std::vector<std::byte> broadcast(std::span<const std::byte> bytes, rank_id root,
                                   std::string_view step = "broadcast");
  /// All ranks return, or all throw the same error: the one of the lowest failing rank (of those
  /// that did not just time out, if there is one), of its own class, its message led by "rank N:"
  /// and followed by how many others failed. `mine` is this rank's failure or null; an exception
  /// that is not an evmm::error counts as driver_error.
  void agree(std::exception_ptr mine, std::string_view step = "agree");

  /// Typed all_gather of one trivially copyable value.
  template <class T>
  std::vector<T> all_gather_value(const T& mine, std::string_view step = "all_gather");

  // --- nodes: ranks that run under one operating system and can pass descriptors to each other.

  /// Node of each rank, numbered from 0 in order of their lowest rank.
  const std::vector<int>& nodes() const noexcept { return nodes_; }
  int node() const noexcept { return nodes_[static_cast<std::size_t>(rank_.value)]; }
  int node_count() const noexcept { return node_count_; }
  /// Ranks of this node, ascending.
  const std::vector<rank_id>& node_ranks() const noexcept { return node_ranks_; }
  /// This rank's index in node_ranks().
  int node_rank() const noexcept { return node_rank_; }
  /// What tells one operating system's descriptor space from another's: the kernel's boot id and
  /// the network and process namespaces (abstract sockets do not cross the one, nor the peer's
  /// process id the other), never the host name. EVMM_HOST_ID, when set, is appended: ranks with
  /// different values count as different nodes. Throws unsupported without /proc.
  static std::string host_identity();

  /// A way for bytes to ranks of other nodes, beside the bootstrap and independent of it. Over MPI
  /// it takes MPI_THREAD_MULTIPLE, which make_mpi_bootstrap asks for when it initialises MPI.
  /// Collective. Throws unsupported where there is none: over a store or a callback.
  virtual std::shared_ptr<node_link> make_link();

 protected:
  bootstrap(rank_id rank, int size);

  /// The primitive. Returns every rank's bytes, by rank, before `deadline`; else throws timed_out
  /// naming the ranks that did not arrive, or peer_error, and lets the other ranks know if it can.
  /// Never called again once it has thrown. `step` is for messages only.
  virtual std::vector<std::vector<std::byte>> gather(std::span<const std::byte> mine,
                                                     std::chrono::steady_clock::time_point deadline,
                                                     std::string_view step) = 0;

  /// Gathers every rank's host_identity() and tells nodes apart by it. Implementations make this
  /// their first call, at the end of construction. Collective: what one rank cannot tell, an
  /// EVMM_TIMEOUT_MS that it cannot read included, all throw.
  void find_nodes();
  /// The same from identities already known, one a rank, without a collective call: throws on the
  /// ranks that cannot read their EVMM_TIMEOUT_MS.
  void set_nodes(std::span<const std::string> identities);

 private:
  enum class call : std::uint8_t { all_gather, barrier, broadcast, agree };
  std::vector<std::vector<std::byte>> framed_gather(call kind, std::string_view step,
                                                    std::span<const std::byte> mine);

  rank_id rank_;
  int size_;
  milliseconds timeout_;
  std::uint64_t sequence_ = 0;
  std::string broken_by_;  ///< empty while all is well
  std::vector<int> nodes_;
  int node_count_ = 1;
  std::vector<rank_id> node_ranks_;
  int node_rank_ = 0;
};

/// Over MPI: on a duplicate of `communicator`, or of MPI_COMM_WORLD when null. Initialises MPI when
/// nobody has, and then finalises it at exit. Collective over the communicator; when not all its
/// ranks come, timed_out, which MPI gives no way to put names to. Throws unsupported when built
/// without MPI.
std::shared_ptr<bootstrap> make_mpi_bootstrap(ompi_communicator_t* communicator = nullptr);

/// A key-value store that all ranks see: torch.distributed's TCPStore, Redis, etcd, a directory.
/// What its functions throw on one rank fails the step on all, as a peer_error.
struct key_value_store {
  /// Publishes a value; a rank sets a key once.
  std::function<void(const std::string& key, std::span<const std::byte> value)> set;
  /// The value, or nullopt if it is not there within the wait, which may be 0. Called again until
  /// the deadline.
  std::function<std::optional<std::vector<std::byte>>(const std::string& key,
                                                      std::chrono::milliseconds wait)>
      get;
  /// Removes a key nobody will ask for again. May be empty.
  std::function<void(const std::string& key)> erase = {};
};
/// Over a store; `job` keeps the keys of jobs that share one apart, so a store sees each name once.
/// Keys are evmm/<job>/<step>/<rank>, and evmm/<job>/lost when a step failed. Collective.
std::shared_ptr<bootstrap> make_store_bootstrap(rank_id rank, int size, key_value_store store,
                                                std::string job = "evmm");

/// Over a callback that gathers every rank's bytes (of lengths that may differ), by rank.
using all_gather_function =
    std::function<std::vector<std::vector<std::byte>>(std::span<const std::byte> mine)>;
/// The callback owns the waiting and its deadline, and lets the other ranks know when it fails:
/// nothing can interrupt it from here. What it throws becomes a peer_error. Collective.
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
  std::vector<T> values;
  for (std::size_t i = 0; i < gathered.size(); ++i) {
    if (gathered[i].size() != sizeof(T)) {
      throw peer_error("rank " + std::to_string(i) + " sent " + std::to_string(gathered[i].size()) +
                       " bytes in " + std::string(step) + ", expected " +
                       std::to_string(sizeof(T)));
    }
    T value;
    std::memcpy(&value, gathered[i].data(), sizeof(T));
    values.push_back(value);
  }
  return values;
}

}  // namespace evmm
