// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/comm/bootstrap.hpp>
#include <evmm/unique_fd.hpp>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <sys/types.h>

// Ranks as forked processes, without an mpirun that would end them all when one dies.

namespace evmm::test {

/// What a process says when the machine does not let it do what the test takes.
inline const std::string k_cannot = "cannot";

/// A forked process. Nothing of the test program runs there but what it is given: not its clean-up,
/// nor the rest of its tests.
class forked_process {
 public:
  explicit forked_process(const std::function<std::string()>& body);
  /// Waits for it. What it returned: empty when all was well; what() of what it threw; or "killed
  /// by signal N".
  std::string end() const;

 private:
  pid_t process_ = -1;
  unique_fd says_;
};

/// Runs `body` as each rank, and returns their ends by rank.
std::vector<std::string> run_processes(
    int size, const std::function<std::string(const std::shared_ptr<bootstrap>&)>& body);

/// Moves this process into a network and a /dev/shm of that size in which nobody else leaves
/// anything. False where that is not allowed.
bool move_out(std::size_t shared_memory);

/// Sockets by name, and files of shared memory, in the namespaces of this process.
std::string left_behind();

}  // namespace evmm::test
