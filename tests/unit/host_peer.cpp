// SPDX-License-Identifier: Apache-2.0
// The other process of host_driver_test.cpp: maps the memory it is told of, expects a number in the
// first word and leaves that number plus one in the second.
//
//   host_peer fd <descriptor>        host_peer fabric <handle in hex>
#include <evmm/address_range.hpp>
#include <evmm/host_driver.hpp>
#include <evmm/mapping.hpp>
#include <evmm/physical_memory.hpp>
#include <evmm/units.hpp>

#include <array>
#include <cstdio>
#include <exception>
#include <string>

namespace {

using namespace evmm;
using namespace evmm::units;

fabric_handle parse(const std::string& hex) {
  fabric_handle shared{};
  for (std::size_t i = 0; i < shared.size(); ++i) {
    shared[i] = static_cast<std::byte>(std::stoi(hex.substr(2 * i, 2), nullptr, 16));
  }
  return shared;
}

void answer(const std::string& how, const std::string& what) {
  const auto on = host_driver::make({.fabric = true});
  const bool fabric = how == "fabric";
  const allocation_request request{.bytes = 4_MiB,
                                   .where = {tier::device, 0},
                                   .share = fabric ? share_kind::fabric : share_kind::fd};
  const auto memory = fabric ? physical_memory::import_fabric(*on, parse(what), request)
                             : physical_memory::import_fd(*on, std::stoi(what), request);
  const address_range range(*on, request.bytes);
  const mapping mapped(*on, range.base(), memory, std::array{access_grant{request.where}});
  auto* const words = reinterpret_cast<int*>(range.base());
  words[1] = words[0] + 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  try {
    answer(argv[1], argv[2]);
    return 0;
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "host_peer: %s\n", failure.what());
    return 1;
  }
}
