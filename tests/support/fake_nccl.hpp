// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/types.hpp>

#include <cstddef>
#include <functional>

// A libnccl without GPUs, for memory of the host driver: ranks are threads or processes of one
// machine. It looks up in /proc which handles lie behind an address, maps peers' memory as NCCL
// does, and does wrong what each version does wrong. Settings come from FAKE_NCCL_* (the names
// below, in capitals) when it is loaded, and from fake_nccl_configure.

namespace evmm::test {

/// What a rank does at the call that is to fail.
enum class fake_failure : int {
  none,
  report,  ///< takes part, and reports an error where its peers succeed
  absent,  ///< reports an error at once: its peers wait for it
  lie,     ///< reports success: a window covers its first handle, half of a sum is not written
};

struct fake_nccl_settings {
  int version = 22809;
  int null_windows = 0;  ///< no symmetric support: success, and a null window
  int fail_rank = -1;    ///< the rank that fails, below
  int fail_after = 0;    ///< calls of that rank and kind which still go well
  fake_failure fail_register = fake_failure::none;  ///< of a window
  fake_failure fail_reduce = fake_failure::none;    ///< an all-reduce
  int fail_buffer = 0;                              ///< its next registration of a user buffer
  int wrong_pointers = 0;                           ///< peers' addresses lead to the own memory
  int fail_deregister = 0;                          ///< the next deregistration of that rank fails
  int fail_init = 0;                                ///< its next communicator fails
  int fail_finalize = 0;  ///< its next ncclCommFinalize fails, where its peers' succeed
  int fail_device = 0;    ///< its next device communicator fails, and its peers wait for it
  int fail_transfer = 0;  ///< its next sends and receives fail, and their peers wait for them
};

/// Of this process.
struct fake_nccl_counts {
  int communicators = 0;
  int windows = 0, buffers = 0;   ///< registered now
  std::size_t window_bytes = 0;   ///< behind them
  int registrations = 0;          ///< of windows, ever
  int collectives = 0;            ///< ever
  int registered_before_any = 0;  ///< windows registered before the communicator's first collective
  int remapped = 0;               ///< windows whose memory was replaced while they were live
  int allocations = 0;            ///< by ncclMemAlloc, and not freed
  int device_communicators = 0;
};

/// Runs a function of a rank in the order of a stream.
using fake_nccl_launch = std::function<void(int rank, native_stream, std::function<void()>)>;

}  // namespace evmm::test

/// How ncclSend and ncclRecv of this process's ranks, which are threads, get onto streams; without,
/// and after null, they are refused.
void fake_nccl_launch_by(evmm::test::fake_nccl_launch launch);

extern "C" {
void fake_nccl_configure(const evmm::test::fake_nccl_settings* settings);
evmm::test::fake_nccl_counts fake_nccl_count();
}
