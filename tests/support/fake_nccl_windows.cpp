// SPDX-License-Identifier: Apache-2.0
#include "tests/support/fake_nccl_state.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include <sys/mman.h>
#include <unistd.h>

// Windows and user buffers of the fake NCCL.

using evmm::address;
using namespace evmm::test;

namespace {

constexpr int k_no_segments_below = 22900;  // maps the first handle alone
constexpr int k_several_segments = 23003;

/// What is registered must still lie behind its addresses.
template <class Registered>
void compare_handles(const Registered& it) {
  if (handles_behind(it.base, it.bytes) != it.handles) count([](auto& of) { ++of.remapped; });
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
  const fake_failure failure = failure_of(comm, &fake_nccl_settings::fail_register);
  if (failure == fake_failure::absent) return evmm::nccl_internal_error;
  auto window = std::make_unique<ncclWindow_vidmem>();
  window->base = base;
  window->bytes = bytes;
  window->handles = handles_behind(base, bytes);
  const int supported = check_support(window->handles, bytes, base);
  // Every rank comes, also with memory that it refuses: its peers have the same.
  std::size_t mapped = supported == evmm::nccl_success ? window->handles.size() : 0;
  if (version() < k_no_segments_below || failure == fake_failure::lie) {
    mapped = std::min<std::size_t>(mapped, 1);
  }
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

  const mapped_handle& last = window->handles[mapped - 1];
  window->covered = std::min<std::size_t>(bytes, last.at + last.bytes - base);
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

}  // namespace

namespace evmm::test {

void look_for_remapped(const ncclWindow_vidmem& window) {
  compare_handles(window);
}

void drop_window(const ncclWindow_vidmem& window) {
  compare_handles(window);
  ::munmap(reinterpret_cast<void*>(window.flat),
           window.stride * static_cast<std::size_t>(window.ranks));
  count([&](auto& of) {
    --of.windows;
    of.window_bytes -= window.bytes;
  });
}

void drop_buffer(const registered_buffer& buffer) {
  compare_handles(buffer);
  count([](auto& of) { --of.buffers; });
}

std::size_t covered_floats(const ncclComm& comm, const void* at, std::size_t floats) {
  const auto first = reinterpret_cast<address>(at);
  for (const auto& window : comm.windows) {
    if (first < window->base || first >= window->base + window->bytes) continue;
    const std::size_t before = first - window->base;
    const std::size_t left = window->covered > before ? window->covered - before : 0;
    return std::min(floats, left / sizeof(float));
  }
  return floats;
}

}  // namespace evmm::test

// --- as nccl.h declares them ----------------------------------------------------------------

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
  const std::lock_guard lock(guard);
  const address theirs = window->flat + static_cast<std::size_t>(rank) * window->stride +
                         (window->base - window->handles.front().at);
  *found = reinterpret_cast<void*>((settings.wrong_pointers != 0 ? window->base : theirs) + offset);
  return evmm::nccl_success;
}

FAKE_API int ncclCommRegister(const ncclComm* comm, void* base, std::size_t bytes, void** handle) {
  if (fails(comm, &fake_nccl_settings::fail_buffer)) return evmm::nccl_system_error;
  const auto handles = handles_behind(reinterpret_cast<address>(base), bytes);
  *handle = nullptr;
  if (setting("NCCL_LOCAL_REGISTER", 1) == 0) return evmm::nccl_success;
  if (handles.size() != 1 || handles.front().host) return evmm::nccl_success;
  *handle = &comm->buffers.emplace_back(
      registered_buffer{reinterpret_cast<address>(base), bytes, handles});
  count([](auto& of) { ++of.buffers; });
  return evmm::nccl_success;
}
FAKE_API int ncclCommDeregister(const ncclComm* comm, void* handle) {
  const auto found = std::find_if(comm->buffers.begin(), comm->buffers.end(),
                                  [&](const auto& each) { return &each == handle; });
  if (found == comm->buffers.end()) return evmm::nccl_invalid_argument;
  drop_buffer(*found);
  comm->buffers.erase(found);
  return evmm::nccl_success;
}
