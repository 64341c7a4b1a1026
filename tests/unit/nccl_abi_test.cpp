// SPDX-License-Identifier: Apache-2.0
// What comm/nccl_library.hpp declares, beside what nccl.h does.
#include "comm/nccl_library.hpp"

#include <gtest/gtest.h>
#include <nccl.h>

#include <cstddef>
#include <type_traits>

namespace evmm {
namespace {

static_assert(std::is_same_v<ncclComm_t, ncclComm*>);
static_assert(std::is_same_v<ncclWindow_t, ncclWindow_vidmem*>);
static_assert(sizeof(nccl_unique_id) == sizeof(ncclUniqueId));
static_assert(alignof(nccl_unique_id) == alignof(ncclUniqueId));
static_assert(std::is_trivially_copyable_v<nccl_unique_id>);

static_assert(int{nccl_success} == ncclSuccess);
static_assert(int{nccl_unhandled_cuda_error} == ncclUnhandledCudaError);
static_assert(int{nccl_system_error} == ncclSystemError);
static_assert(int{nccl_internal_error} == ncclInternalError);
static_assert(int{nccl_invalid_argument} == ncclInvalidArgument);
static_assert(int{nccl_invalid_usage} == ncclInvalidUsage);
static_assert(int{nccl_remote_error} == ncclRemoteError);
static_assert(int{nccl_in_progress} == ncclInProgress);

static_assert(offsetof(nccl_config, size) == offsetof(ncclConfig_t, size));
static_assert(offsetof(nccl_config, magic) == offsetof(ncclConfig_t, magic));
static_assert(offsetof(nccl_config, version) == offsetof(ncclConfig_t, version));
static_assert(offsetof(nccl_config, blocking) == offsetof(ncclConfig_t, blocking));

static_assert(nccl_window_default == NCCL_WIN_DEFAULT);
static_assert(nccl_window_symmetric == NCCL_WIN_COLL_SYMMETRIC);
static_assert(nccl_window_alignment == NCCL_WIN_REQUIRED_ALIGNMENT);
static_assert(nccl_float32 == ncclFloat32);
static_assert(nccl_sum == ncclSum);

TEST(nccl_abi, the_config_starts_as_nccls_does) {
  const ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
  EXPECT_EQ(nccl_config{}.magic, theirs.magic);
}

}  // namespace
}  // namespace evmm
