// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/cli/finding.hpp"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace evmm::cli {

// Limits of the process and of its container, and what its environment asks for. Each
// check reads the machine and hands what it read to a function that judges it; those are what the
// tests call.

/// Soft and hard limit; nullopt is unlimited.
struct limit_pair {
  std::optional<std::uint64_t> soft;
  std::optional<std::uint64_t> hard;
};
limit_pair read_limit(int resource);

finding judge_open_files(const limit_pair& limit);
finding judge_locked_memory(const limit_pair& limit, bool infiniband);
/// `reserved`: whether 4 TiB of addresses could be reserved.
finding judge_address_space(const limit_pair& limit, bool reserved);
/// The three modes of vm.overcommit_memory.
finding judge_overcommit(int mode);
finding judge_map_count(long most);
/// Of /dev/shm; nullopt when there is none.
finding judge_shared_memory(std::optional<std::size_t> total, std::size_t free);
/// `limit` of the control group, nullopt for none, against the machine's memory.
finding judge_memory_limit(std::optional<std::size_t> limit, std::size_t used,
                           std::size_t physical);

/// `refused`: why the environment's options are not taken, empty when they are; `options` then.
finding judge_allocator_options(const std::string& refused, const std::string& options);

/// `refused` likewise, of the deadline of steps between ranks; `timeout_ms` when it is taken.
finding judge_timeout(const std::string& refused, long timeout_ms);

/// The path of this process's memory control group in a /proc/self/cgroup, and whether it is of
/// version 2.
struct cgroup_path {
  std::string path;
  bool unified = true;
};
std::optional<cgroup_path> parse_cgroup(std::string_view text);
/// The bytes of a limit file; nullopt for "max" and for the huge number that version 1 has for it.
std::optional<std::size_t> parse_cgroup_limit(std::string_view text);

finding check_open_files();
finding check_locked_memory();
finding check_address_space();
finding check_overcommit();
finding check_map_count();
finding check_shared_memory();
finding check_memory_limit();
finding check_huge_pages();
finding check_allocator_options();
finding check_timeout();

}  // namespace evmm::cli
