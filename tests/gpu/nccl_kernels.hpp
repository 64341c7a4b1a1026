// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/types.hpp>

#include <cstddef>
#include <cstdint>

struct ncclWindow_vidmem;

namespace evmm::test {

/// NCCL whose headers the kernels were compiled with: 22809 for 2.28.9.
int compiled_nccl_version();
/// Whether ncclGetLsaPointer of those headers reads what windows of a NCCL found at run time hold.
bool reads_windows_of(int version);

/// Adds to `*wrong` the words in which the two ranges differ.
void compare(const std::uint64_t* a, const std::uint64_t* b, std::size_t words,
             unsigned long long* wrong, native_stream stream);
/// The same with the second range found on the device, by NCCL's own ncclGetLsaPointer: `offset` in
/// the window's part of LSA rank `peer`.
void compare_with_lsa(const std::uint64_t* a, ncclWindow_vidmem* window, std::size_t offset,
                      int peer, std::size_t words, unsigned long long* wrong, native_stream stream);
/// Writes word i = first + i where NCCL's pointer leads: a store into a peer's memory.
void count_into_lsa(ncclWindow_vidmem* window, std::size_t offset, int peer, std::size_t words,
                    std::uint64_t first, native_stream stream);

}  // namespace evmm::test
