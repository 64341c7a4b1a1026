// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/cli/finding.hpp"

#include <optional>
#include <string_view>

namespace evmm::cli {

// Whether processes of this machine can hand memory to each other.

/// `failure` is the errno of passing a descriptor over an abstract Unix socket; 0 when it arrived.
finding judge_descriptor_passing(int failure);
/// `failure` is the errno of fetching one's own descriptor with pidfd_getfd.
finding judge_pidfd(int failure);
/// kernel.yama.ptrace_scope; nullopt without Yama.
finding judge_ptrace_scope(std::optional<int> scope);
/// A /proc/self/status.
finding judge_sandbox(std::string_view status_text);
/// `failure` is the errno of setting a memory policy on a page.
finding judge_memory_policy(int failure);
/// `failure` is the errno of memfd_create.
finding judge_memfd(int failure);

finding check_descriptor_passing();
finding check_pidfd();
finding check_ptrace_scope();
finding check_sandbox();
finding check_memory_policy();
finding check_memfd();

}  // namespace evmm::cli
