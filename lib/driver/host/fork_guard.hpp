// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace evmm::host {

/// How many forks lie between this process and the one that first asked. An object that remembers
/// the value it was made under knows that it sits in a forked child, at the price of one load.
unsigned fork_generation() noexcept;

}  // namespace evmm::host
