// SPDX-License-Identifier: Apache-2.0
// The other process of allocator_sharing_contract.hpp: receives a shared allocation on descriptor
// 3, expects pattern 1 in its first BYTES bytes and leaves pattern 2 there.
//
//   evmm_allocation_peer BYTES
#include "tests/support/descriptor_passing.hpp"
#include "tests/support/patterns.hpp"

#include <evmm/allocator/caching_allocator.hpp>

#include <cstdio>
#include <exception>
#include <string>

#include <unistd.h>

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  try {
    using namespace evmm;
    const std::size_t bytes = std::stoull(argv[1]);
    const auto on = make_driver();
    caching_allocator allocator(on, device_id{0});
    const auto message = test::receive_message(3);
    const auto shared = allocator.import_allocation({message.bytes, message.fds});
    for (const int fd : message.fds) ::close(fd);
    const auto at = reinterpret_cast<address>(shared.get());
    if (!test::holds_pattern(*on, at, bytes, 1)) return 3;
    test::write_pattern(*on, at, bytes, 2);
    return 0;
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "allocation_peer: %s\n", failure.what());
    return 1;
  }
}
