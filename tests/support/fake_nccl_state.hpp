// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/nccl_library.hpp"
#include "tests/support/fake_nccl.hpp"
#include "tests/support/fake_nccl_parts.hpp"

#include <atomic>
#include <cstddef>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

// What the files of the fake NCCL share: its communicators, its settings and its counts.

#define FAKE_API extern "C" __attribute__((visibility("default")))

/// A user buffer.
struct registered_buffer {
  evmm::address base = 0;
  std::size_t bytes = 0;
  std::vector<evmm::test::mapped_handle> handles;
};

/// A window: where each rank's memory is mapped, and what lay behind our own when it was made.
struct ncclWindow_vidmem {
  evmm::address base = 0;
  std::size_t bytes = 0;
  std::vector<evmm::test::mapped_handle> handles;
  std::size_t covered = 0;  ///< bytes of it that are really in the window
  evmm::address flat = 0;   ///< one stride for each rank
  std::size_t stride = 0;
  int ranks = 0;
};

struct ncclComm {
  int rank = 0;
  int size = 0;
  std::unique_ptr<evmm::test::meeting> all;
  bool blocking = true;
  bool poisoned = false;
  std::atomic<bool> give_up{false};
  std::atomic<int> result{evmm::nccl_success};
  std::thread work;
  bool first_collective = false;
  std::atomic<int> on_streams{0};  ///< sends and receives that are not over
  std::vector<std::unique_ptr<ncclWindow_vidmem>> windows;
  int device_communicators = 0;
  mutable std::list<registered_buffer> buffers;  ///< NCCL registers them on a const one

  ~ncclComm() {
    if (work.joinable()) work.join();
  }
};

namespace evmm::test {

/// Guards the settings and the counts of this process.
extern std::mutex guard;
extern fake_nccl_settings settings;
extern fake_nccl_counts counts;

int version();
template <class Change>
void count(Change change) {
  const std::lock_guard lock(guard);
  change(counts);
}
/// A number from the environment.
int setting(const char* name, int otherwise);

/// Runs a call here, or behind the caller's back on a communicator that does not block.
int run(ncclComm* comm, std::function<int()> body);
/// Whether this is the rank whose next call of a kind fails; that failure is over then.
bool fails(const ncclComm* comm, int fake_nccl_settings::*what);
/// The failure of this rank's next call of a kind, if it is its turn.
fake_failure failure_of(const ncclComm* comm, fake_failure fake_nccl_settings::*kind);

/// Lets go of it, and counts it where its memory was replaced meanwhile.
void drop_window(const ncclWindow_vidmem& window);
void drop_buffer(const registered_buffer& buffer);
void look_for_remapped(const ncclWindow_vidmem& window);
/// How much of a collective's memory its window covers, where it has one.
std::size_t covered_floats(const ncclComm& comm, const void* at, std::size_t floats);

}  // namespace evmm::test
