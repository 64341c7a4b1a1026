// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi_calls.hpp"

#include "lib/support/fork_guard.hpp"
#include "lib/support/patience.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string_view>

#ifndef OPEN_MPI
#error "evmm's bootstrap over MPI is written for Open MPI; configure with EVMM_MPI=OFF"
#endif

namespace evmm::mpi {

namespace {
std::atomic<bool> any_lost{false};

const fork_guard& process() {
  static const fork_guard first_user;
  return first_user;
}
}  // namespace

bool usable() noexcept {
  int finalized = 0;
  MPI_Finalized(&finalized);
  return finalized == 0 && !process().forked();
}

void mark_lost() noexcept {
  any_lost = true;
}

void check(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  throw peer_error(
      fmt::format("{}: {}", call, std::string_view(text.data(), static_cast<std::size_t>(length))),
      {}, code);
}

void initialize() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  int initialized = 0;
  int finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  if (finalized != 0) throw invalid_argument("MPI is finalised already");
  static_cast<void>(process());
  if (initialized != 0) return;
  int provided = MPI_THREAD_SINGLE;
  check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided), "MPI_Init_thread");
  std::atexit([] {
    if (usable() && !any_lost) MPI_Finalize();
  });
}

MPI_Comm duplicate(MPI_Comm of, std::chrono::milliseconds timeout) {
  // MPI writes the result when the request completes, maybe after this call gave up.
  auto made = std::make_unique<MPI_Comm>(MPI_COMM_NULL);
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Comm_idup(of, made.get(), &request), "MPI_Comm_idup");
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  patience wait;
  for (int done = 0;;) {
    check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Comm_idup");
    if (done != 0) break;
    if (std::chrono::steady_clock::now() >= deadline) {
      any_lost = true;
      static_cast<void>(made.release());
      throw timed_out(fmt::format("not all ranks of the communicator came to be in its duplicate "
                                  "within {} ms",
                                  timeout.count()),
                      "make_mpi_bootstrap and make_link are collective; EVMM_TIMEOUT_MS allows "
                      "more time");
    }
    wait.spend();
  }
  check(MPI_Comm_set_errhandler(*made, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return *made;
}

namespace {

struct gate {
  std::shared_mutex mutex;
  bool shut = false;
};
/// Never destroyed: threads may still come.
gate& finalize_gate() {
  static auto* const made = new gate;
  return *made;
}

int shut_gate(MPI_Comm, int, void*, void*) {
  const std::lock_guard lock(finalize_gate().mutex);
  finalize_gate().shut = true;
  return MPI_SUCCESS;
}

}  // namespace

thread_call::thread_call() : held_(finalize_gate().mutex), there_(!finalize_gate().shut) {}

void watch_finalize() {
  // What MPI_COMM_SELF has goes before anything else of MPI does.
  static const int watching = [] {
    int key = MPI_KEYVAL_INVALID;
    check(MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, shut_gate, &key, nullptr),
          "MPI_Comm_create_keyval");
    check(MPI_Comm_set_attr(MPI_COMM_SELF, key, nullptr), "MPI_Comm_set_attr");
    return key;
  }();
  static_cast<void>(watching);
}

int rank_in(MPI_Comm communicator) {
  int rank = 0;
  check(MPI_Comm_rank(communicator, &rank), "MPI_Comm_rank");
  return rank;
}

int size_of(MPI_Comm communicator) {
  int size = 0;
  check(MPI_Comm_size(communicator, &size), "MPI_Comm_size");
  return size;
}

}  // namespace evmm::mpi
