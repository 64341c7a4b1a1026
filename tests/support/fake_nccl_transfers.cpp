// SPDX-License-Identifier: Apache-2.0
// ncclSend, ncclRecv and their groups, between threads of one process: a group holds its stream
// until every part of it has met its peer's.
#include "tests/support/fake_nccl_state.hpp"

#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <tuple>
#include <utility>

using namespace evmm::test;

namespace {

struct part {
  ncclComm* comm = nullptr;
  evmm::native_stream stream = nullptr;
  bool send = false;
  int peer = 0;
  std::byte* at = nullptr;
  std::size_t bytes = 0;
};
thread_local std::vector<part> group;
thread_local int depth = 0;

std::mutex mutex;
std::condition_variable changed;
fake_nccl_launch launch;

/// Held out by a sender until a receiver took it.
struct offer {
  const part* from = nullptr;
  bool taken = false;
};
using line = std::tuple<std::string, int, int>;  // communicator, sender, receiver
std::map<line, std::deque<offer*>> offers;

line line_of(const part& each) {
  const int me = each.comm->rank;
  return {each.comm->all->path(), each.send ? me : each.peer, each.send ? each.peer : me};
}

/// Looks again now and then: nobody tells that a communicator is given up.
template <class Done>
bool wait(std::unique_lock<std::mutex>& lock, const ncclComm& comm, Done&& done) {
  while (!done()) {
    if (comm.give_up) return false;
    changed.wait_for(lock, std::chrono::milliseconds(1));
  }
  return true;
}

/// Sends and receives side by side, as one kernel does.
void carry_out(const std::vector<part>& parts) {
  std::unique_lock lock(mutex);
  std::deque<offer> held_out;
  for (const part& each : parts) {
    if (each.send) offers[line_of(each)].push_back(&held_out.emplace_back(offer{&each}));
  }
  changed.notify_all();
  for (const part& each : parts) {
    if (each.send) continue;
    auto& line = offers[line_of(each)];
    if (!wait(lock, *each.comm, [&] { return !line.empty(); })) break;
    offer& met = *line.front();
    line.pop_front();
    // What NCCL does with sizes that differ is not said; here the receiver sees it.
    std::memcpy(each.at, met.from->at, std::min(each.bytes, met.from->bytes));
    met.taken = true;
    changed.notify_all();
  }
  for (const offer& each : held_out) {
    if (wait(lock, *each.from->comm, [&] { return each.taken; })) continue;
    std::erase(offers[line_of(*each.from)], &each);
  }
}

int begin(std::vector<part> parts) {
  ncclComm* const comm = parts.front().comm;
  fake_nccl_launch onto;
  {
    const std::lock_guard lock(mutex);
    onto = launch;
  }
  if (!onto) return evmm::nccl_invalid_usage;
  return run(comm, [comm, onto, parts = std::move(parts)] {
    if (fails(comm, &fake_nccl_settings::fail_transfer)) return int{evmm::nccl_system_error};
    ++comm->on_streams;
    onto(comm->rank, parts.front().stream, [comm, parts] {
      carry_out(parts);
      --comm->on_streams;
    });
    return int{evmm::nccl_success};
  });
}

int add(const part& each) {
  if (depth == 0) return begin({each});
  group.push_back(each);
  return evmm::nccl_success;
}

}  // namespace

__attribute__((visibility("default"))) void fake_nccl_launch_by(fake_nccl_launch by) {
  const std::lock_guard lock(mutex);
  launch = std::move(by);
}

FAKE_API int ncclGroupStart() {
  ++depth;
  return evmm::nccl_success;
}
FAKE_API int ncclGroupEnd() {
  if (--depth > 0 || group.empty()) return evmm::nccl_success;
  return begin(std::exchange(group, {}));
}
FAKE_API int ncclSend(const void* from, std::size_t bytes, int, int to, ncclComm* comm,
                      evmm::native_stream stream) {
  auto* const at = static_cast<std::byte*>(const_cast<void*>(from));
  return add({comm, stream, true, to, at, bytes});
}
FAKE_API int ncclRecv(void* into, std::size_t bytes, int, int from, ncclComm* comm,
                      evmm::native_stream stream) {
  return add({comm, stream, false, from, static_cast<std::byte*>(into), bytes});
}
