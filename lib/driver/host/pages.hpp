// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/driver.hpp>
#include <evmm/unique_fd.hpp>

#include <cstddef>

// What the host driver asks of the operating system: memfd pages for physical memory, and mmap for
// addresses. No bookkeeping here; arguments have been checked. Failures are driver_error with
// errno.
namespace evmm::host {

inline constexpr std::size_t k_granularity = std::size_t{2} << 20;

// --- physical memory: one memfd a handle ------------------------------------------------------

/// Zeroed, sparse pages of a size that nobody can change later.
unique_fd make_pages(std::size_t bytes, tier kind);
/// Binds the pages to a NUMA node when the machine has it and the kernel allows it.
void bind_pages(int fd, std::size_t bytes, numa_node node) noexcept;
/// A second descriptor of the same pages.
unique_fd duplicate(int fd);
/// Throws invalid_argument unless `fd` came from make_pages(bytes), here or in another process.
void check_pages(int fd, std::size_t bytes);

/// Names the pages behind `fd` of this process for processes that may open /proc/<pid>/fd.
fabric_handle name_pages(int fd, std::size_t bytes);
/// Opens what name_pages named; invalid_argument when it is no such name or another size.
unique_fd open_pages(const fabric_handle& name, std::size_t bytes);

// --- addresses --------------------------------------------------------------------------------

/// Addresses that nothing backs, aligned; at `hint` when it is aligned and free.
address reserve_addresses(std::size_t bytes, std::size_t alignment, address hint);
void free_addresses(address base, std::size_t bytes) noexcept;
/// Puts the pages behind reserved addresses, untouchable until protect().
void map_pages(address at, std::size_t bytes, int fd);
/// Makes them reserved addresses without pages again.
void unmap_pages(address at, std::size_t bytes);
void protect(address at, std::size_t bytes, access_kind access);

// --- ordinary memory --------------------------------------------------------------------------

/// Zeroed pages that only this process sees, made when they are touched; back by free_addresses.
address map_private(std::size_t bytes);
/// Whether all pages of the range, which starts on one, belong to the process.
bool is_mapped(address at, std::size_t bytes) noexcept;

/// Lets the process open as many descriptors as the system allows it: each handle here costs one,
/// and the usual soft limit of 1,024 is far below what a driver's users create.
void raise_descriptor_limit() noexcept;

}  // namespace evmm::host
