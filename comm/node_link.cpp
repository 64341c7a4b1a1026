// SPDX-License-Identifier: Apache-2.0
#include <evmm/comm/node_link.hpp>

namespace evmm {

std::unique_ptr<node_exchange> node_link::make_exchange(symmetric_region&) {
  return nullptr;
}

std::unique_ptr<large_transfers> node_link::make_large_transfers(device_id) {
  return nullptr;
}

}  // namespace evmm
