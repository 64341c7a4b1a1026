// SPDX-License-Identifier: Apache-2.0
#include "tests/support/rank_processes.hpp"

#include "tests/support/directory_store.hpp"

#include <array>
#include <filesystem>
#include <fstream>
#include <stdexcept>

#include <sched.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

namespace evmm::test {

forked_process::forked_process(const std::function<std::string()>& body) {
  std::array<int, 2> ends{};
  if (::pipe(ends.data()) != 0) throw std::runtime_error("cannot make a pipe");
  says_ = unique_fd(ends[0]);
  const unique_fd mouth(ends[1]);
  process_ = ::fork();
  if (process_ < 0) throw std::runtime_error("cannot fork");
  if (process_ > 0) return;
  std::string said;
  try {
    said = body();
  } catch (const std::exception& failure) {
    said = failure.what();
  }
  const auto written = ::write(mouth.get(), said.data(), said.size());
  ::_exit(written == static_cast<ssize_t>(said.size()) ? 0 : 1);
}

std::string forked_process::end() const {
  std::string said;
  std::array<char, 4096> some{};
  for (ssize_t got = 0; (got = ::read(says_.get(), some.data(), some.size())) > 0;) {
    said.append(some.data(), static_cast<std::size_t>(got));
  }
  int status = 0;
  ::waitpid(process_, &status, 0);
  if (WIFSIGNALED(status)) return "killed by signal " + std::to_string(WTERMSIG(status));
  if (WEXITSTATUS(status) != 0) return "ended with code " + std::to_string(WEXITSTATUS(status));
  return said;
}

std::vector<std::string> run_processes(
    int size, const std::function<std::string(const std::shared_ptr<bootstrap>&)>& body) {
  const directory_store store;
  // Ranks of other users write there too.
  std::filesystem::permissions(store.path(), std::filesystem::perms::all);
  std::vector<forked_process> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back(
        [&] { return body(make_store_bootstrap(rank_id{rank}, size, store.face())); });
  }
  std::vector<std::string> ends;
  for (const forked_process& rank : ranks) ends.push_back(rank.end());
  return ends;
}

bool move_out(std::size_t shared_memory) {
  const std::string size = "size=" + std::to_string(shared_memory);
  return ::unshare(CLONE_NEWNET | CLONE_NEWNS) == 0 &&
         ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         ::mount("tmpfs", "/dev/shm", "tmpfs", 0, size.c_str()) == 0;
}

std::string left_behind() {
  std::string found;
  std::ifstream sockets("/proc/self/net/unix");
  for (std::string line; std::getline(sockets, line);) {
    if (line.find('@') != std::string::npos) found += line + "; ";
  }
  for (const auto& file : std::filesystem::directory_iterator("/dev/shm")) {
    found += file.path().string() + "; ";
  }
  return found;
}

}  // namespace evmm::test
