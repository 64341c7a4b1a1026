// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/types.hpp>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <sys/types.h>

// What fake_nccl.cpp is made of: ranks that meet in a file, and a look at what is mapped.

namespace evmm::test {

/// Ranks that find each other in a file which all map: threads and processes alike.
class meeting {
 public:
  static constexpr std::size_t k_ranks = 8;
  static constexpr std::size_t k_bytes = 65536;
  using message = std::array<std::byte, k_bytes>;

  /// The file of a new meeting, to be named to the others.
  static std::string found();
  meeting(std::string path, int rank, int size);
  meeting(const meeting&) = delete;
  meeting& operator=(const meeting&) = delete;
  ~meeting();

  const std::string& path() const { return path_; }

  /// Every rank's message; nullopt once `give_up` is set.
  std::optional<std::vector<message>> gather(const message& mine, const std::atomic<bool>& give_up);

 private:
  struct area;
  std::string path_;
  int rank_;
  int size_;
  area* area_;
  std::uint64_t round_ = 0;
};

/// One handle behind a range of addresses, of those that the host driver maps.
struct mapped_handle {
  address at = 0;
  std::size_t bytes = 0;
  std::uint64_t inode = 0;
  int descriptor = -1;
  bool host = false;
  friend bool operator==(const mapped_handle& a, const mapped_handle& b) {
    return a.at == b.at && a.bytes == b.bytes && a.inode == b.inode;
  }
};
/// The handles that [base, base + bytes) touches, in order; fewer bytes than that when some of it
/// is not backed.
[[gnu::visibility("default")]] std::vector<mapped_handle> handles_behind(address base,
                                                                         std::size_t bytes);

/// Maps a descriptor of another process, as an import does.
void map_of_process(address at, std::size_t bytes, pid_t process, int descriptor);

}  // namespace evmm::test
