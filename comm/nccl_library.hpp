// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/types.hpp>

#include <cstddef>
#include <string>

struct ncclComm;           // ncclComm_t points to one
struct ncclWindow_vidmem;  // and ncclWindow_t to one

namespace evmm {

// As nccl.h has them, which need not be there when this is built. A test compares the two.

/// ncclResult_t, as far as anything depends on it.
enum nccl_result : int {
  nccl_success = 0,
  nccl_unhandled_cuda_error = 1,
  nccl_system_error = 2,
  nccl_internal_error = 3,
  nccl_invalid_argument = 4,
  nccl_invalid_usage = 5,
  nccl_remote_error = 6,
  nccl_in_progress = 7,
};

/// ncclUniqueId.
struct nccl_unique_id {
  char bytes[128] = {};
};

/// ncclConfig_t of 2.14, the first that has `blocking`. Every later NCCL goes by the size and the
/// version that it is given, and fills in the rest.
struct nccl_config {
  std::size_t size = sizeof(nccl_config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 1;
};

inline constexpr int nccl_window_default = 0;    // NCCL_WIN_DEFAULT
inline constexpr int nccl_window_symmetric = 1;  // NCCL_WIN_COLL_SYMMETRIC
inline constexpr int nccl_int8 = 0;              // ncclInt8
inline constexpr int nccl_float32 = 7;           // ncclFloat32
inline constexpr int nccl_sum = 0;               // ncclSum
inline constexpr std::size_t nccl_window_alignment = 4096;

// Those that every NCCL has which evmm runs with.
// clang-format off
#define EVMM_NCCL_ENTRY_POINTS(entry)                                                             \
  entry(get_version, ncclGetVersion, int(int*))                                                   \
  entry(get_unique_id, ncclGetUniqueId, int(nccl_unique_id*))                                     \
  entry(comm_init, ncclCommInitRankConfig,                                                        \
        int(ncclComm**, int, nccl_unique_id, int, nccl_config*))                                  \
  entry(comm_finalize, ncclCommFinalize, int(ncclComm*))                                          \
  entry(comm_destroy, ncclCommDestroy, int(ncclComm*))                                            \
  entry(comm_abort, ncclCommAbort, int(ncclComm*))                                                \
  entry(error_string, ncclGetErrorString, const char*(int))                                       \
  entry(last_error, ncclGetLastError, const char*(ncclComm*))                                     \
  entry(async_error, ncclCommGetAsyncError, int(ncclComm*, int*))                                 \
  entry(comm_count, ncclCommCount, int(const ncclComm*, int*))                                    \
  entry(comm_rank, ncclCommUserRank, int(const ncclComm*, int*))                                  \
  entry(comm_device, ncclCommCuDevice, int(const ncclComm*, int*))                                \
  entry(all_reduce, ncclAllReduce,                                                                \
        int(const void*, void*, std::size_t, int, int, ncclComm*, native_stream))                 \
  entry(group_start, ncclGroupStart, int())                                                       \
  entry(group_end, ncclGroupEnd, int())                                                           \
  entry(send, ncclSend, int(const void*, std::size_t, int, int, ncclComm*, native_stream))        \
  entry(receive, ncclRecv, int(void*, std::size_t, int, int, ncclComm*, native_stream))

/// Those that an older NCCL lacks; null then.
#define EVMM_NCCL_LATER_ENTRY_POINTS(entry)                                                       \
  entry(buffer_register, ncclCommRegister, int(const ncclComm*, void*, std::size_t, void**))      \
  entry(buffer_deregister, ncclCommDeregister, int(const ncclComm*, void*))                       \
  entry(window_register, ncclCommWindowRegister,                                                  \
        int(ncclComm*, void*, std::size_t, ncclWindow_vidmem**, int))                             \
  entry(window_deregister, ncclCommWindowDeregister, int(ncclComm*, ncclWindow_vidmem*))          \
  entry(peer_pointer, ncclGetPeerDevicePointer,                                                   \
        int(ncclWindow_vidmem*, std::size_t, int, void**))                                        \
  entry(query_properties, ncclCommQueryProperties, int(ncclComm*, void*))                         \
  entry(device_comm_create, ncclDevCommCreate, int(ncclComm*, const void*, void*))                \
  entry(device_comm_destroy, ncclDevCommDestroy, int(ncclComm*, const void*))
// clang-format on

/// libnccl's functions, found at run time.
struct nccl_api {
  template <class Function>
  using pointer = Function*;
#define EVMM_NCCL_MEMBER(member, symbol, type) pointer<type> member = nullptr;
  EVMM_NCCL_ENTRY_POINTS(EVMM_NCCL_MEMBER)
  EVMM_NCCL_LATER_ENTRY_POINTS(EVMM_NCCL_MEMBER)
#undef EVMM_NCCL_MEMBER
};

/// libnccl as this process found it, or why there is none.
struct nccl_library {
  nccl_api api;
  std::string path;          ///< the file it lies in
  std::string why_not = {};  ///< empty when usable
  std::string help = {};
};

/// Finds libnccl at the first call and never unloads it: one that the program has loaded already,
/// else the file that EVMM_NCCL_LIBRARY names, else libnccl.so.2. Two in one process would not know
/// of each other's communicators.
const nccl_library& load_nccl();

}  // namespace evmm
