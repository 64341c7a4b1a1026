// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/gated_driver.hpp"

#include <evmm/allocator/statistics.hpp>
#include <evmm/driver.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace evmm::test {

/// Marks in the first and last bytes of a block, written and read in stream order by functions that
/// play kernels. Whoever gets memory that somebody's work still uses destroys the marks before that
/// work has read them.
class marker {
 public:
  /// Enqueues the writing of the mark `tag` into a block.
  void write(driver& on, native_stream stream, void* at, std::size_t bytes, std::uint64_t tag);
  /// Enqueues a look whether it is still there.
  void check(driver& on, native_stream stream, void* at, std::size_t bytes, std::uint64_t tag,
             const char* when);
  /// What the first look that failed has found; empty when none has.
  std::string failure() const;
  bool failed() const { return shared_->failures.load(std::memory_order_relaxed) != 0; }

 private:
  struct state {
    std::atomic<int> failures{0};
    std::mutex mutex;
    std::string first;
  };
  std::shared_ptr<state> shared_ = std::make_shared<state>();
};

/// A live allocation, as its user knows it.
struct live_block {
  void* at = nullptr;
  std::size_t bytes = 0;        ///< asked for
  std::size_t block_bytes = 0;  ///< what it got
  native_stream stream = nullptr;
  bool small = false;
  int pool = 0;  ///< 0 is the default one
  std::uint64_t tag = 0;
  std::vector<native_stream> users = {};  ///< other streams, by record_stream
  bool captured = false;                  ///< written and read by a graph alone

  address begin() const { return reinterpret_cast<address>(at); }
  address end() const { return begin() + block_bytes; }
};

/// What must be true of an allocator, from what its user has done. Not thread-safe: its owner
/// locks.
class allocator_oracle {
 public:
  explicit allocator_oracle(const gated_driver& gates) : gates_(gates) {}

  /// A new allocation. Returns what is wrong with it, or an empty text: it overlaps a live one, or
  /// memory of a graph, or memory that work behind a closed gate still uses while its own stream
  /// does not stand behind that gate.
  std::string add(const live_block& block);
  /// A block is about to be freed, after its last work was enqueued. `sure` when nothing has
  /// failed: then the block waits for its users' streams.
  void remove(const live_block& block, bool sure = true);

  /// Memory of graph pools, which only that pool may hand out.
  void keep(int pool, const live_block& block);
  void forget(int pool) { graphs_.erase(pool); }

  const std::map<address, live_block>& live() const { return live_; }
  live_block& at(address begin) { return live_.at(begin); }
  std::size_t live_in(int pool) const;

  /// Bounds of what is active: live blocks, and those that may, or must, still wait for streams.
  struct bounds {
    std::int64_t least = 0, most = 0, least_bytes = 0, most_bytes = 0;
  };
  bounds active(bool by_event) const;
  /// Everything freed so far has come back.
  void settled() { waiting_.clear(); }

  void reset_peaks();
  void reset_totals();
  /// What differs in the statistics that are exact at any time; empty when nothing does.
  std::string compare(const allocator_statistics& told) const;

 private:
  struct freed {
    address begin, end;
    gate_set hazards;  ///< gates before which its last work stands
  };
  struct waits {
    std::int64_t bytes;
    gate_set gates;
    bool sure;
  };
  void count(const live_block& block, int sign);

  const gated_driver& gates_;
  std::map<address, live_block> live_;
  std::map<int, std::size_t> pools_;
  std::vector<freed> freed_;
  std::vector<waits> waiting_;
  std::map<int, std::vector<std::pair<address, address>>> graphs_;
  pool_statistic allocation_, allocated_bytes_, requested_bytes_;
};

}  // namespace evmm::test
