// SPDX-License-Identifier: Apache-2.0
#include <evmm/unique_fd.hpp>

#include <unistd.h>

namespace evmm {

void unique_fd::reset() noexcept {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

}  // namespace evmm
