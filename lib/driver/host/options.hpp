// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/host_driver.hpp>

namespace evmm::host {

/// The options with nodes in ascending order. Throws invalid_argument for a machine that cannot be.
host_driver_options checked(host_driver_options options);

}  // namespace evmm::host
