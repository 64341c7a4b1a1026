// SPDX-License-Identifier: Apache-2.0
#include <evmm/comm/node_link.hpp>
#include <evmm/error.hpp>

namespace evmm {

void node_link::exchange(std::span<const block>, std::span<const block>, native_stream) {
  throw unsupported("the link '" + name() + "' has no exchange in stream order");
}

}  // namespace evmm
