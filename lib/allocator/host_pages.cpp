// SPDX-License-Identifier: Apache-2.0
#include "lib/allocator/host_pages.hpp"

#include "lib/support/format.hpp"
#include "lib/support/log.hpp"

#include <evmm/error.hpp>

#include <climits>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>
#include <thread>
#include <vector>

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace evmm::pinned {

namespace {

constexpr std::size_t k_page = 4096;
constexpr std::size_t k_huge_page = std::size_t{2} << 20;
constexpr std::size_t k_most_nodes = 1024;  ///< what kernels are built for at most
constexpr std::size_t k_bits = sizeof(unsigned long) * CHAR_BIT;
using node_mask = std::array<unsigned long, k_most_nodes / k_bits>;

void* pointer(address at) {
  return reinterpret_cast<void*>(at);
}

std::optional<node_mask> mask_of(numa_node node) {
  if (node.value < 0 || static_cast<std::size_t>(node.value) >= k_most_nodes) return std::nullopt;
  const auto index = static_cast<std::size_t>(node.value);
  node_mask mask{};
  mask[index / k_bits] = 1UL << (index % k_bits);
  return mask;
}

int mode_of(bool strict) {
  return strict ? MPOL_BIND : MPOL_PREFERRED;
}

void report(numa_node node, int code) {
  log().debug("pinned memory is not put on NUMA node {}: {}", node.value,
              std::generic_category().message(code));
}

}  // namespace

address map_pages(std::size_t bytes) {
  void* const at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) {
    const int code = errno;
    throw out_of_memory(fmt::format("cannot map {}: {} (errno {})", format_bytes(bytes),
                                    std::generic_category().message(code), code),
                        "ask for less, or raise ulimit -v", code);
  }
  // Fewer, larger pages are made and pinned faster; where there are none, nothing is lost.
  if (bytes >= k_huge_page) ::madvise(at, bytes, MADV_HUGEPAGE);
  return reinterpret_cast<address>(at);
}

void unmap_pages(address at, std::size_t bytes) noexcept {
  if (::munmap(pointer(at), bytes) != 0) {
    log().error("unmapping {} of pinned memory: errno {}", format_bytes(bytes), errno);
  }
}

void bind_pages(address at, std::size_t bytes, numa_node node, bool strict) noexcept {
  const auto mask = mask_of(node);
  const bool bound = mask && ::syscall(SYS_mbind, pointer(at), bytes, mode_of(strict), mask->data(),
                                       k_most_nodes, 0UL) == 0;
  if (!bound) report(node, mask ? errno : EINVAL);
}

void touch_pages(address at, std::size_t bytes, unsigned threads) {
  const auto touch = [](address from, address to) {
    for (address each = from; each < to; each += k_page) {
      *reinterpret_cast<volatile char*>(each) = 0;
    }
  };
  // Pieces are whole huge pages, so that no two threads make one page.
  const std::size_t pieces = std::min<std::size_t>(std::max(threads, 1U), bytes / k_huge_page + 1);
  const std::size_t piece = (bytes / pieces + k_huge_page - 1) / k_huge_page * k_huge_page;
  std::vector<std::jthread> helpers;
  helpers.reserve(pieces);
  address next = at;
  const address end = at + bytes;
  for (std::size_t i = 1; i < pieces && end - next > piece; ++i, next += piece) {
    try {
      helpers.emplace_back(touch, next, next + piece);
    } catch (const std::system_error&) {
      break;  // no more threads: this one does the rest
    }
  }
  touch(next, end);
}

struct memory_policy::saved {
  int mode = MPOL_DEFAULT;
  node_mask mask{};
};

memory_policy::memory_policy(std::optional<numa_node> node, bool strict) {
  if (!node) return;
  const auto mask = mask_of(*node);
  auto before = std::make_unique<saved>();
  const bool set = mask &&
                   ::syscall(SYS_get_mempolicy, &before->mode, before->mask.data(), k_most_nodes,
                             nullptr, 0UL) == 0 &&
                   ::syscall(SYS_set_mempolicy, mode_of(strict), mask->data(), k_most_nodes) == 0;
  if (set) {
    before_ = std::move(before);
  } else {
    report(*node, mask ? errno : EINVAL);
  }
}

memory_policy::~memory_policy() {
  if (!before_) return;
  if (::syscall(SYS_set_mempolicy, before_->mode, before_->mask.data(), k_most_nodes) != 0) {
    log().error("the thread's memory policy could not be restored: errno {}", errno);
  }
}

}  // namespace evmm::pinned
