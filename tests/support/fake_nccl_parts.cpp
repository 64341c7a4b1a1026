// SPDX-License-Identifier: Apache-2.0
#include "tests/support/fake_nccl_parts.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <stdexcept>
#include <thread>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace evmm::test {

// Messages lie in two buffers by turns: nobody writes a round's buffer again before all have read
// it, since they come to the next round only then.
struct meeting::area {
  struct place {
    std::atomic<std::uint64_t> round;
    message buffers[2];
  };
  place places[k_ranks];
};

std::string meeting::found() {
  char path[] = "/tmp/fake_nccl_XXXXXX";
  const int fd = ::mkstemp(path);
  if (fd < 0 || ::ftruncate(fd, sizeof(area)) != 0) throw std::runtime_error("no file to meet in");
  ::close(fd);
  return path;
}

meeting::meeting(std::string path, int rank, int size)
    : path_(std::move(path)), rank_(rank), size_(size) {
  // A rank that failed at once may have removed the file already: then this one waits in vain.
  const int fd = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0 || ::ftruncate(fd, sizeof(area)) != 0 || size > static_cast<int>(k_ranks))
    throw std::runtime_error("cannot meet in " + path_);
  void* const at = ::mmap(nullptr, sizeof(area), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ::close(fd);
  if (at == MAP_FAILED) throw std::runtime_error("cannot map " + path_);
  area_ = static_cast<area*>(at);
}

meeting::~meeting() {
  ::munmap(area_, sizeof(area));
  ::unlink(path_.c_str());
}

std::optional<std::vector<meeting::message>> meeting::gather(const message& mine,
                                                             const std::atomic<bool>& give_up) {
  const std::size_t buffer = round_ % 2;
  area_->places[rank_].buffers[buffer] = mine;
  area_->places[rank_].round.store(++round_, std::memory_order_release);
  std::vector<message> all(static_cast<std::size_t>(size_));
  for (std::size_t r = 0; r < all.size(); ++r) {
    while (area_->places[r].round.load(std::memory_order_acquire) < round_) {
      if (give_up) return std::nullopt;
      std::this_thread::yield();
    }
    all[r] = area_->places[r].buffers[buffer];
  }
  return all;
}

namespace {

/// Descriptors of this process by the inode of their memory file.
std::map<std::uint64_t, int> descriptors() {
  std::map<std::uint64_t, int> found;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", ignored)) {
    const int fd = std::atoi(entry.path().filename().c_str());
    struct stat status {};
    if (::fstat(fd, &status) == 0 && S_ISREG(status.st_mode)) found[status.st_ino] = fd;
  }
  return found;
}

}  // namespace

std::vector<mapped_handle> handles_behind(address base, std::size_t bytes) {
  std::vector<mapped_handle> found;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    unsigned long start = 0;
    unsigned long end = 0;
    unsigned long offset = 0;
    unsigned long inode = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx %*s %lx %*s %lu", &start, &end, &offset, &inode) != 4) {
      continue;
    }
    if (end <= base || start >= base + bytes) continue;
    const auto name = line.find("/memfd:evmm");
    if (name == std::string::npos) continue;
    // A handle whose accesses differ by page shows as several lines.
    if (!found.empty() && found.back().inode == inode &&
        found.back().at + found.back().bytes == start) {
      found.back().bytes += end - start;
      continue;
    }
    found.push_back({.at = start - offset,
                     .bytes = end - start + offset,
                     .inode = inode,
                     .host = line.find("evmm-host", name) != std::string::npos});
  }
  const auto open = descriptors();
  for (mapped_handle& handle : found) {
    if (const auto at = open.find(handle.inode); at != open.end()) handle.descriptor = at->second;
  }
  return found;
}

void map_of_process(address at, std::size_t bytes, pid_t process, int descriptor) {
  const std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(descriptor);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) throw std::runtime_error("cannot open " + path + ": " + std::strerror(errno));
  void* const mapped = ::mmap(reinterpret_cast<void*>(at), bytes, PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_FIXED, fd, 0);
  ::close(fd);
  if (mapped == MAP_FAILED) throw std::runtime_error("cannot map " + path);
}

}  // namespace evmm::test
