// SPDX-License-Identifier: Apache-2.0
#include "lib/driver/host/pages.hpp"

#include "lib/support/format.hpp"
#include "lib/support/log.hpp"

#include <evmm/error.hpp>

#include <climits>
#include <fmt/format.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <source_location>
#include <vector>

#include <fcntl.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace evmm::host {

namespace {

constexpr int k_seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr std::uint64_t k_fabric_magic = 0x65766d6d66616231;  // "evmmfab1"

struct page_name {
  std::uint64_t magic;
  std::uint64_t device;
  std::uint64_t inode;
  std::uint64_t bytes;
  std::int32_t process;
  std::int32_t descriptor;
};
static_assert(sizeof(page_name) <= sizeof(fabric_handle));

void* pointer(address at) {
  return reinterpret_cast<void*>(at);
}

[[noreturn]] void fail(std::string doing, int code, std::string help = {},
                       std::source_location where = std::source_location::current()) {
  if (help.empty() && (code == EMFILE || code == ENFILE)) {
    help = "raise the limit of open files (ulimit -n), or create fewer, larger handles";
  }
  if (help.empty() && code == ENOMEM) {
    help = "raise vm.max_map_count or the limit of addresses (ulimit -v), or use larger handles";
  }
  throw driver_error(fmt::format("{}: {} (errno {})", std::move(doing),
                                 std::generic_category().message(code), code),
                     std::move(help), code, where);
}

struct stat status_of(int fd) {
  struct stat found {};
  if (::fstat(fd, &found) != 0) {
    throw invalid_argument(
        fmt::format("descriptor {}: {}", fd, std::generic_category().message(errno)),
        "pass a descriptor that export_fd gave", errno);
  }
  return found;
}

constexpr int k_reserved = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

}  // namespace

unique_fd make_pages(std::size_t bytes, tier kind) {
  const char* const name = kind == tier::device ? "evmm-device" : "evmm-host";
  unique_fd fd(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) fail("memfd_create", errno);
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    fail(fmt::format("sizing a memfd to {}", format_bytes(bytes)), errno);
  }
  // A peer that shrank the file would make everyone's accesses a SIGBUS.
  if (::fcntl(fd.get(), F_ADD_SEALS, k_seals) != 0) fail("sealing a memfd", errno);
  return fd;
}

void bind_pages(int fd, std::size_t bytes, numa_node node) noexcept {
  struct stat found {};
  const auto directory = fmt::format("/sys/devices/system/node/node{}", node.value);
  if (::stat(directory.c_str(), &found) != 0) return;
  // The policy of a shared file sticks to the file, so a passing mapping is enough to set it.
  void* const at = ::mmap(nullptr, bytes, PROT_NONE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) return;
  constexpr std::size_t bits = sizeof(unsigned long) * CHAR_BIT;
  const auto index = static_cast<std::size_t>(node.value);
  std::vector<unsigned long> mask(index / bits + 1);
  mask[index / bits] = 1UL << (index % bits);
  // The kernel reads one bit less than it is told.
  if (::syscall(SYS_mbind, at, bytes, MPOL_BIND, mask.data(), mask.size() * bits + 1, 0UL) != 0) {
    log().debug("host memory is not bound to NUMA node {}: {}", node.value, std::strerror(errno));
  }
  ::munmap(at, bytes);
}

unique_fd duplicate(int fd) {
  unique_fd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!copy) fail("duplicating a descriptor", errno);
  return copy;
}

void check_pages(int fd, std::size_t bytes) {
  const auto found = status_of(fd);
  const int seals = S_ISREG(found.st_mode) ? ::fcntl(fd, F_GET_SEALS) : -1;
  if (seals < 0 || (seals & k_seals) != k_seals) {
    throw invalid_argument(fmt::format("descriptor {} is not memory of a host driver", fd),
                           "pass a descriptor that export_fd of a host driver gave");
  }
  if (static_cast<std::size_t>(found.st_size) != bytes) {
    throw invalid_argument(
        fmt::format("descriptor {} holds {}, not the {} asked for", fd,
                    format_bytes(static_cast<std::size_t>(found.st_size)), format_bytes(bytes)),
        "pass the owner's allocation_request");
  }
}

fabric_handle name_pages(int fd, std::size_t bytes) {
  const auto found = status_of(fd);
  const page_name name{k_fabric_magic, found.st_dev, found.st_ino, bytes, ::getpid(), fd};
  fabric_handle shared{};
  std::memcpy(shared.data(), &name, sizeof name);
  return shared;
}

unique_fd open_pages(const fabric_handle& shared, std::size_t bytes) {
  page_name name{};
  std::memcpy(&name, shared.data(), sizeof name);
  if (name.magic != k_fabric_magic) {
    throw invalid_argument("these bytes are not a fabric handle of a host driver",
                           "pass the owner's export_fabric unchanged");
  }
  const auto path = fmt::format("/proc/{}/fd/{}", name.process, name.descriptor);
  unique_fd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!fd) {
    fail("opening a fabric handle through " + path, errno,
         "the owner must keep its handle until all peers have imported it, and be of this user");
  }
  const auto found = status_of(fd.get());
  if (found.st_dev != name.device || found.st_ino != name.inode) {
    throw invalid_argument(
        fmt::format("the fabric handle is stale: {} is something else by now", path),
        "the owner must keep its handle until all peers have imported it");
  }
  check_pages(fd.get(), bytes);
  return fd;
}

address reserve_addresses(std::size_t bytes, std::size_t alignment, address hint) {
  if (hint != 0 && hint % alignment == 0) {
    void* const at =
        ::mmap(pointer(hint), bytes, PROT_NONE, k_reserved | MAP_FIXED_NOREPLACE, -1, 0);
    if (at == pointer(hint)) return hint;
    if (at != MAP_FAILED) ::munmap(at, bytes);  // a kernel that does not know the flag
  }
  // Reserve enough to hold an aligned range wherever it falls, then give the ends back.
  const std::size_t padded = bytes + alignment;
  void* const at = ::mmap(nullptr, padded, PROT_NONE, k_reserved, -1, 0);
  if (at == MAP_FAILED) {
    fail(fmt::format("reserving {} of addresses", format_bytes(bytes)), errno,
         "a process has about 128 TiB of addresses; reserve less, and check ulimit -v");
  }
  const auto start = reinterpret_cast<address>(at);
  const address base = (start + alignment - 1) / alignment * alignment;
  if (base != start) ::munmap(at, base - start);
  if (base + bytes != start + padded)
    ::munmap(pointer(base + bytes), start + padded - base - bytes);
  return base;
}

void free_addresses(address base, std::size_t bytes) noexcept {
  if (::munmap(pointer(base), bytes) != 0) {
    log().error("giving {} of addresses back: {}", format_bytes(bytes), std::strerror(errno));
  }
}

void map_pages(address at, std::size_t bytes, int fd) {
  if (::mmap(pointer(at), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, fd, 0) != MAP_FAILED) return;
  const int code = errno;
  // The kernel may have dropped the reservation before it failed.
  log_failure("reserving addresses again", [&] { unmap_pages(at, bytes); });
  fail(fmt::format("mapping {} at {}", format_bytes(bytes), format_address(at)), code);
}

void unmap_pages(address at, std::size_t bytes) {
  if (::mmap(pointer(at), bytes, PROT_NONE, k_reserved | MAP_FIXED, -1, 0) == MAP_FAILED) {
    fail(fmt::format("unmapping {} at {}", format_bytes(bytes), format_address(at)), errno);
  }
}

void protect(address at, std::size_t bytes, access_kind access) {
  const int mode = access == access_kind::none   ? PROT_NONE
                   : access == access_kind::read ? PROT_READ
                                                 : PROT_READ | PROT_WRITE;
  if (::mprotect(pointer(at), bytes, mode) != 0) {
    fail(fmt::format("setting access to {} at {}", format_bytes(bytes), format_address(at)), errno);
  }
}

address map_private(std::size_t bytes) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* const at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (at == MAP_FAILED) fail(fmt::format("mapping {}", format_bytes(bytes)), errno);
  return reinterpret_cast<address>(at);
}

bool is_mapped(address at, std::size_t bytes) noexcept {
  return ::msync(pointer(at), bytes, MS_ASYNC) == 0;  // does nothing but look, for such pages
}

void raise_descriptor_limit() noexcept {
  struct rlimit limit {};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) {
    log().debug("the limit of open files stays: {}", std::strerror(errno));
  }
}

}  // namespace evmm::host
