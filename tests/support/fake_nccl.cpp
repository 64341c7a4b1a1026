// SPDX-License-Identifier: Apache-2.0
#include "tests/support/fake_nccl.hpp"

#include "comm/nccl_library.hpp"
#include "tests/support/fake_nccl_parts.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

#define FAKE_API extern "C" __attribute__((visibility("default")))

using evmm::address;
using evmm::nccl_result;
using evmm::nccl_unique_id;
using namespace evmm::test;

namespace {

constexpr int k_no_segments_below = 22900;  // maps the first handle alone
constexpr int k_several_segments = 23003;

int setting(const char* name, int otherwise) {
  const char* const text = std::getenv(name);  // NOLINT(concurrency-mt-unsafe)
  return text != nullptr ? std::atoi(text) : otherwise;
}

std::mutex guard;  // of what follows
fake_nccl_settings settings = {
    .version = setting("FAKE_NCCL_VERSION", 22809),
    .null_windows = setting("FAKE_NCCL_NULL_WINDOWS", 0),
    .fail_rank = setting("FAKE_NCCL_FAIL_RANK", -1),
    .fail_after = setting("FAKE_NCCL_FAIL_AFTER", 0),
    .fail_register = static_cast<fake_failure>(setting("FAKE_NCCL_FAIL_REGISTER", 0)),
    .fail_deregister = setting("FAKE_NCCL_FAIL_DEREGISTER", 0),
    .fail_init = setting("FAKE_NCCL_FAIL_INIT", 0),
};
fake_nccl_counts counts;
std::set<void*> allocations;

int version() {
  const std::lock_guard lock(guard);
  return settings.version;
}
template <class Change>
void count(Change change) {
  const std::lock_guard lock(guard);
  change(counts);
}

}  // namespace

/// A window: where each rank's memory is mapped, and what lay behind our own when it was made.
struct ncclWindow_vidmem {
  address base = 0;
  std::size_t bytes = 0;
  std::vector<mapped_handle> handles;
  address flat = 0;  ///< one stride for each rank
  std::size_t stride = 0;
  int ranks = 0;
};

struct ncclComm {
  int rank = 0;
  int size = 0;
  std::unique_ptr<meeting> all;
  bool blocking = true;
  bool poisoned = false;
  std::atomic<bool> give_up{false};
  std::atomic<int> result{evmm::nccl_success};
  std::thread work;
  bool first_collective = false;
  int to_register = 0;  ///< registrations until one fails
  std::vector<std::unique_ptr<ncclWindow_vidmem>> windows;
  int device_communicators = 0;

  ~ncclComm() {
    if (work.joinable()) work.join();
  }
};

namespace {

/// Runs a call here, or behind the caller's back on a communicator that does not block.
int run(ncclComm* comm, std::function<int()> body) {
  if (comm->work.joinable()) comm->work.join();
  if (comm->poisoned) return evmm::nccl_internal_error;
  const auto whole = [comm, body = std::move(body)] {
    const int result = body();
    if (result != evmm::nccl_success) comm->poisoned = true;
    return result;
  };
  if (comm->blocking) return comm->result = whole();
  comm->result = evmm::nccl_in_progress;
  comm->work = std::thread([comm, whole] { comm->result = whole(); });
  return evmm::nccl_success;
}

/// Waits until every rank is here.
int meet(ncclComm* comm) {
  return comm->all->gather({}, comm->give_up) ? evmm::nccl_success : evmm::nccl_remote_error;
}

void look_for_remapped(const ncclWindow_vidmem& window) {
  if (handles_behind(window.base, window.bytes) != window.handles) {
    count([](auto& of) { ++of.remapped; });
  }
}

bool fails(const ncclComm* comm, int fake_nccl_settings::*what) {
  const std::lock_guard lock(guard);
  return comm->rank == settings.fail_rank && std::exchange(settings.*what, 0) != 0;
}

/// The failure of this rank's next registration, if it is its turn.
fake_failure register_failure(const ncclComm* comm) {
  const std::lock_guard lock(guard);
  if (comm->rank != settings.fail_rank || settings.fail_register == fake_failure::none) {
    return fake_failure::none;
  }
  if (settings.fail_after-- > 0) return fake_failure::none;
  return std::exchange(settings.fail_register, fake_failure::none);
}

/// What ranks tell each other about their part of a window.
struct offer {
  pid_t process;
  int handles;
  struct {
    std::size_t bytes;
    int descriptor;
    bool host;
  } of[64];
};
static_assert(sizeof(offer) <= meeting::k_bytes);

/// What a version accepts; the error that it gives for the rest.
int check_support(const std::vector<mapped_handle>& handles, std::size_t bytes, address base) {
  if (handles.empty() || handles.size() > 64) return evmm::nccl_unhandled_cuda_error;
  const std::size_t backed = handles.back().at + handles.back().bytes - handles.front().at;
  std::size_t sum = 0;
  bool host = false;
  for (const mapped_handle& each : handles) {
    sum += each.bytes;
    host = host || each.host;
  }
  if (handles.front().at > base || sum != backed || backed - (base - handles.front().at) < bytes) {
    return evmm::nccl_unhandled_cuda_error;  // not every byte is mapped
  }
  if ((base - handles.front().at) % evmm::nccl_window_alignment != 0) {
    return evmm::nccl_invalid_argument;
  }
  if (version() >= k_several_segments) {
    return host && setting("NCCL_ELASTIC_BUFFER_REGISTER", 1) == 0 ? evmm::nccl_invalid_argument
                                                                   : evmm::nccl_success;
  }
  if (handles.front().host) return evmm::nccl_unhandled_cuda_error;
  if (version() >= k_no_segments_below && handles.size() > 1) return evmm::nccl_invalid_argument;
  return evmm::nccl_success;
}

int make_window(ncclComm* comm, address base, std::size_t bytes, ncclWindow_vidmem** made) {
  const fake_failure failure = register_failure(comm);
  if (failure == fake_failure::absent) return evmm::nccl_internal_error;
  auto window = std::make_unique<ncclWindow_vidmem>();
  window->base = base;
  window->bytes = bytes;
  window->handles = handles_behind(base, bytes);
  const int supported = check_support(window->handles, bytes, base);
  // Every rank comes, also with memory that it refuses: its peers have the same.
  std::size_t mapped = supported == evmm::nccl_success ? window->handles.size() : 0;
  if (version() < k_no_segments_below) mapped = std::min<std::size_t>(mapped, 1);
  offer mine{.process = ::getpid(), .handles = static_cast<int>(mapped), .of = {}};
  for (std::size_t i = 0; i < mapped; ++i) {
    const mapped_handle& each = window->handles[i];
    mine.of[i] = {each.bytes, each.descriptor, each.host};
  }
  meeting::message message{};
  std::memcpy(message.data(), &mine, sizeof(mine));
  const auto offers = comm->all->gather(message, comm->give_up);
  if (!offers) return evmm::nccl_remote_error;
  if (supported != evmm::nccl_success) return supported;
  if (failure == fake_failure::report) return evmm::nccl_system_error;

  window->ranks = comm->size;
  window->stride = bytes + (base - window->handles.front().at);
  for (const mapped_handle& each : window->handles) window->stride += each.bytes;
  void* const flat = ::mmap(nullptr, window->stride * offers->size(), PROT_NONE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (flat == MAP_FAILED) return evmm::nccl_system_error;
  window->flat = reinterpret_cast<address>(flat);
  for (std::size_t r = 0; r < offers->size(); ++r) {
    offer of_rank;
    std::memcpy(&of_rank, (*offers)[r].data(), sizeof(of_rank));
    address at = window->flat + r * window->stride;
    for (int i = 0; i < of_rank.handles; ++i) {
      map_of_process(at, of_rank.of[i].bytes, of_rank.process, of_rank.of[i].descriptor);
      at += of_rank.of[i].bytes;
    }
  }
  if (!comm->all->gather(message, comm->give_up)) return evmm::nccl_remote_error;
  count([&](auto& of) {
    ++of.windows;
    ++of.registrations;
    of.window_bytes += bytes;
    if (!comm->first_collective) ++of.registered_before_any;
  });
  *made = window.get();
  comm->windows.push_back(std::move(window));
  return evmm::nccl_success;
}

void drop_window(const ncclWindow_vidmem& window) {
  look_for_remapped(window);
  ::munmap(reinterpret_cast<void*>(window.flat),
           window.stride * static_cast<std::size_t>(window.ranks));
  count([&](auto& of) {
    --of.windows;
    of.window_bytes -= window.bytes;
  });
}

int destroy(ncclComm* comm) {
  if (comm->work.joinable()) comm->work.join();
  for (const auto& window : comm->windows) drop_window(*window);
  count([comm](auto& of) {
    --of.communicators;
    of.device_communicators -= comm->device_communicators;
  });
  delete comm;
  return evmm::nccl_success;
}

}  // namespace

FAKE_API void fake_nccl_configure(const fake_nccl_settings* wanted) {
  const std::lock_guard lock(guard);
  settings = *wanted;
}
FAKE_API fake_nccl_counts fake_nccl_count() {
  const std::lock_guard lock(guard);
  return counts;
}

// --- as nccl.h declares them ----------------------------------------------------------------

FAKE_API int ncclGetVersion(int* found) {
  *found = version();
  return evmm::nccl_success;
}
FAKE_API const char* ncclGetErrorString(int result) {
  return result == evmm::nccl_invalid_argument ? "invalid argument" : "error";
}
FAKE_API const char* ncclGetLastError(ncclComm*) {
  return "said by the fake";
}
FAKE_API int ncclGetUniqueId(nccl_unique_id* id) {
  const std::string path = meeting::found();
  std::memcpy(id->bytes, path.c_str(), path.size() + 1);
  return evmm::nccl_success;
}
FAKE_API int ncclCommInitRankConfig(ncclComm** made, int size, nccl_unique_id id, int rank,
                                    evmm::nccl_config* config) {
  auto* const comm = *made = new ncclComm;
  comm->rank = rank;
  comm->size = size;
  comm->all = std::make_unique<meeting>(id.bytes, rank, size);
  comm->blocking = config->blocking != 0;
  count([](auto& of) { ++of.communicators; });
  const int result = run(comm, [comm] {
    if (fails(comm, &fake_nccl_settings::fail_init)) return int{evmm::nccl_system_error};
    return meet(comm);
  });
  return comm->blocking ? result : evmm::nccl_in_progress;
}
FAKE_API int ncclCommGetAsyncError(ncclComm* comm, int* result) {
  *result = comm->result;
  return evmm::nccl_success;
}
FAKE_API int ncclCommFinalize(ncclComm* comm) {
  return run(comm, [comm] { return meet(comm); });
}
FAKE_API int ncclCommDestroy(ncclComm* comm) {
  return destroy(comm);
}
FAKE_API int ncclCommAbort(ncclComm* comm) {
  comm->give_up = true;
  return destroy(comm);
}
FAKE_API int ncclCommCount(const ncclComm* comm, int* size) {
  *size = comm->size;
  return evmm::nccl_success;
}
FAKE_API int ncclCommUserRank(const ncclComm* comm, int* rank) {
  *rank = comm->rank;
  return evmm::nccl_success;
}
FAKE_API int ncclCommCuDevice(const ncclComm*, int* device) {
  *device = 0;
  return evmm::nccl_success;
}

// The stand-in moves no bytes between ranks: what needs that is for GPUs to test.
FAKE_API int ncclGroupStart() {
  return evmm::nccl_success;
}
FAKE_API int ncclGroupEnd() {
  return evmm::nccl_success;
}
FAKE_API int ncclSend(const void*, std::size_t, int, int, ncclComm*, evmm::native_stream) {
  return evmm::nccl_invalid_usage;
}
FAKE_API int ncclRecv(void*, std::size_t, int, int, ncclComm*, evmm::native_stream) {
  return evmm::nccl_invalid_usage;
}

/// Of int32 sums only, at once whatever the stream holds.
FAKE_API int ncclAllReduce(const void* from, void* to, std::size_t words, int type, int operation,
                           ncclComm* comm, evmm::native_stream) {
  if (type != evmm::nccl_int32 || operation != evmm::nccl_sum) return evmm::nccl_invalid_argument;
  return run(comm, [=] {
    for (const auto& window : comm->windows) look_for_remapped(*window);
    constexpr std::size_t k_words = meeting::k_bytes / sizeof(int);
    for (std::size_t done = 0; done < words; done += k_words) {
      const std::size_t bytes = std::min(k_words, words - done) * sizeof(int);
      meeting::message message{};
      std::memcpy(message.data(), static_cast<const int*>(from) + done, bytes);
      const auto all = comm->all->gather(message, comm->give_up);
      if (!all) return int{evmm::nccl_remote_error};
      std::array<int, k_words> sum{};
      std::array<int, k_words> theirs{};
      for (const meeting::message& of_rank : *all) {
        std::memcpy(theirs.data(), of_rank.data(), sizeof(theirs));
        std::transform(sum.begin(), sum.end(), theirs.begin(), sum.begin(), std::plus<>());
      }
      std::memcpy(static_cast<int*>(to) + done, sum.data(), bytes);
    }
    comm->first_collective = true;
    count([](auto& of) { ++of.collectives; });
    return int{evmm::nccl_success};
  });
}

FAKE_API int ncclCommWindowRegister(ncclComm* comm, void* base, std::size_t bytes,
                                    ncclWindow_vidmem** made, int) {
  *made = nullptr;
  {
    const std::lock_guard lock(guard);
    if (settings.null_windows != 0) return evmm::nccl_success;
  }
  return run(comm, [=] { return make_window(comm, reinterpret_cast<address>(base), bytes, made); });
}
FAKE_API int ncclCommWindowDeregister(ncclComm* comm, ncclWindow_vidmem* window) {
  if (fails(comm, &fake_nccl_settings::fail_deregister)) return evmm::nccl_internal_error;
  const auto found = std::find_if(comm->windows.begin(), comm->windows.end(),
                                  [&](const auto& each) { return each.get() == window; });
  if (found == comm->windows.end()) return evmm::nccl_invalid_argument;
  drop_window(**found);
  comm->windows.erase(found);
  return evmm::nccl_success;
}
FAKE_API int ncclGetPeerDevicePointer(ncclWindow_vidmem* window, std::size_t offset, int rank,
                                      void** found) {
  if (rank < 0 || rank >= window->ranks || offset >= window->bytes) {
    return evmm::nccl_invalid_argument;
  }
  *found = reinterpret_cast<void*>(window->flat + static_cast<std::size_t>(rank) * window->stride +
                                   (window->base - window->handles.front().at) + offset);
  return evmm::nccl_success;
}

/// Of these the fake knows when they are made and gone; what they are is the callers' affair.
FAKE_API int ncclCommQueryProperties(ncclComm*, void*) {
  return evmm::nccl_success;
}
FAKE_API int ncclDevCommCreate(ncclComm* comm, const void*, void*) {
  return run(comm, [comm] {
    if (fails(comm, &fake_nccl_settings::fail_device)) return int{evmm::nccl_invalid_usage};
    const int met = meet(comm);
    if (met != evmm::nccl_success) return met;
    ++comm->device_communicators;
    count([](auto& of) { ++of.device_communicators; });
    return int{evmm::nccl_success};
  });
}
FAKE_API int ncclDevCommDestroy(ncclComm* comm, const void*) {
  --comm->device_communicators;
  count([](auto& of) { --of.device_communicators; });
  return evmm::nccl_success;
}

FAKE_API int ncclCommRegister(const ncclComm*, void* base, std::size_t bytes, void** handle) {
  const auto handles = handles_behind(reinterpret_cast<address>(base), bytes);
  *handle = nullptr;
  if (setting("NCCL_LOCAL_REGISTER", 1) == 0) return evmm::nccl_success;
  if (handles.size() != 1 || handles.front().host) return evmm::nccl_success;
  *handle = new std::pair(reinterpret_cast<address>(base), handles);
  count([](auto& of) { ++of.buffers; });
  return evmm::nccl_success;
}
FAKE_API int ncclCommDeregister(const ncclComm*, void* handle) {
  auto* const known = static_cast<std::pair<address, std::vector<mapped_handle>>*>(handle);
  if (handles_behind(known->first, known->second.front().bytes) != known->second) {
    count([](auto& of) { ++of.remapped; });
  }
  delete known;
  count([](auto& of) { --of.buffers; });
  return evmm::nccl_success;
}

FAKE_API int ncclMemAlloc(void** at, std::size_t bytes) {
  *at = std::malloc(bytes);
  const std::lock_guard lock(guard);
  allocations.insert(*at);
  counts.allocations = static_cast<int>(allocations.size());
  return evmm::nccl_success;
}
FAKE_API int ncclMemFree(void* at) {
  const std::lock_guard lock(guard);
  if (allocations.erase(at) == 0) return evmm::nccl_invalid_argument;
  std::free(at);
  counts.allocations = static_cast<int>(allocations.size());
  return evmm::nccl_success;
}
