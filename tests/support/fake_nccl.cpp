// SPDX-License-Identifier: Apache-2.0
#include "tests/support/fake_nccl_state.hpp"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <utility>

using evmm::nccl_unique_id;
using namespace evmm::test;

namespace evmm::test {

int setting(const char* name, int otherwise) {
  const char* const text = std::getenv(name);  // NOLINT(concurrency-mt-unsafe)
  return text != nullptr ? std::atoi(text) : otherwise;
}

std::mutex guard;
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

int version() {
  const std::lock_guard lock(guard);
  return settings.version;
}

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

bool fails(const ncclComm* comm, int fake_nccl_settings::*what) {
  const std::lock_guard lock(guard);
  return comm->rank == settings.fail_rank && std::exchange(settings.*what, 0) != 0;
}

fake_failure failure_of(const ncclComm* comm, fake_failure fake_nccl_settings::*kind) {
  const std::lock_guard lock(guard);
  if (comm->rank != settings.fail_rank || settings.*kind == fake_failure::none) {
    return fake_failure::none;
  }
  if (settings.fail_after-- > 0) return fake_failure::none;
  return std::exchange(settings.*kind, fake_failure::none);
}

}  // namespace evmm::test

namespace {

std::set<void*> allocations;

/// Waits until every rank is here.
int meet(ncclComm* comm) {
  return comm->all->gather({}, comm->give_up) ? evmm::nccl_success : evmm::nccl_remote_error;
}

int destroy(ncclComm* comm) {
  if (comm->work.joinable()) comm->work.join();
  while (comm->on_streams > 0) std::this_thread::yield();
  for (const auto& window : comm->windows) drop_window(*window);
  for (const auto& buffer : comm->buffers) drop_buffer(buffer);
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
  return run(comm, [comm] {
    const int met = meet(comm);
    return fails(comm, &fake_nccl_settings::fail_finalize) ? int{evmm::nccl_system_error} : met;
  });
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

/// Of float sums in place only, at once whatever the stream holds.
FAKE_API int ncclAllReduce(const void* from, void* to, std::size_t words, int type, int operation,
                           ncclComm* comm, evmm::native_stream) {
  if (type != evmm::nccl_float32 || operation != evmm::nccl_sum || from != to) {
    return evmm::nccl_invalid_argument;
  }
  return run(comm, [=] {
    const fake_failure failure = failure_of(comm, &fake_nccl_settings::fail_reduce);
    if (failure == fake_failure::absent) return int{evmm::nccl_internal_error};
    for (const auto& window : comm->windows) look_for_remapped(*window);
    const std::size_t written =
        failure == fake_failure::lie ? words / 2 : covered_floats(*comm, to, words);
    auto* const values = static_cast<float*>(to);
    constexpr std::size_t k_words = meeting::k_bytes / sizeof(float);
    for (std::size_t done = 0; done < words; done += k_words) {
      const std::size_t some = std::min(k_words, words - done);
      meeting::message message{};
      std::memcpy(message.data(), values + done, some * sizeof(float));
      const auto all = comm->all->gather(message, comm->give_up);
      if (!all) return int{evmm::nccl_remote_error};
      std::array<float, k_words> sum{};
      std::array<float, k_words> theirs{};
      for (const meeting::message& of_rank : *all) {
        std::memcpy(theirs.data(), of_rank.data(), sizeof(theirs));
        std::transform(sum.begin(), sum.end(), theirs.begin(), sum.begin(), std::plus<>());
      }
      if (written > done) {
        std::copy_n(sum.begin(), std::min(some, written - done), values + done);
      }
    }
    comm->first_collective = true;
    count([](auto& of) { ++of.collectives; });
    return int{failure == fake_failure::report ? evmm::nccl_system_error : evmm::nccl_success};
  });
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
