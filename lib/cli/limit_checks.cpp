// SPDX-License-Identifier: Apache-2.0
#include "lib/cli/limit_checks.hpp"

#include "lib/cli/machine.hpp"
#include "lib/support/format.hpp"
#include "lib/support/step_timeout.hpp"
#include "lib/support/text_file.hpp"

#include <evmm/allocator/options.hpp>
#include <evmm/units.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <filesystem>

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/sysinfo.h>

namespace evmm::cli {

namespace {

using namespace evmm::units;

std::string text_of(const std::optional<std::uint64_t>& limit) {
  return limit ? std::to_string(*limit) : "unlimited";
}

std::string bytes_of(const std::optional<std::uint64_t>& limit) {
  return limit ? format_bytes(*limit) : "unlimited";
}

std::optional<long> read_number(const std::string& path) {
  const auto text = read_line(path);
  long value = 0;
  if (!text) return std::nullopt;
  const auto parsed = std::from_chars(text->data(), text->data() + text->size(), value);
  return parsed.ec == std::errc{} ? std::optional(value) : std::nullopt;
}

bool has_entries(const std::string& folder) {
  std::error_code failure;
  const std::filesystem::directory_iterator first(folder, failure);
  return !failure && first != std::filesystem::directory_iterator{};
}

/// The smallest limit from the group up to the root, and what the group uses.
struct group_memory {
  std::optional<std::size_t> limit;
  std::size_t used = 0;
};
group_memory read_group(const cgroup_path& group) {
  const std::string root = group.unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
  const std::string limit_file = group.unified ? "/memory.max" : "/memory.limit_in_bytes";
  const std::string used_file = group.unified ? "/memory.current" : "/memory.usage_in_bytes";
  group_memory found;
  // A container may see its own group at the root, and the host's path in /proc.
  for (std::filesystem::path path = group.path;; path = path.parent_path()) {
    const std::string here = root + (path == "/" ? "" : path.string());
    const auto limit = parse_cgroup_limit(read_line(here + limit_file).value_or("max"));
    if (limit && (!found.limit || *limit < *found.limit)) {
      found.limit = limit;
      found.used = parse_cgroup_limit(read_line(here + used_file).value_or("0")).value_or(0);
    }
    if (path == path.parent_path()) return found;
  }
}

}  // namespace

limit_pair read_limit(int resource) {
  struct rlimit found {};
  if (::getrlimit(static_cast<__rlimit_resource>(resource), &found) != 0) return {};
  const auto known = [](rlim_t value) {
    return value == RLIM_INFINITY ? std::nullopt : std::optional<std::uint64_t>(value);
  };
  return {.soft = known(found.rlim_cur), .hard = known(found.rlim_max)};
}

finding judge_open_files(const limit_pair& limit) {
  constexpr std::uint64_t k_plenty = 4096;
  constexpr std::uint64_t k_least = 256;
  finding result{.found =
                     fmt::format("{} (hard limit {})", text_of(limit.soft), text_of(limit.hard))};
  if (!limit.soft || *limit.soft >= k_plenty) return result;
  result.level = *limit.soft < k_least ? status::fail : status::warn;
  result.meaning =
      "each segment shared by descriptor takes one while it is passed on, besides those of NCCL "
      "and of the job itself";
  result.remedy = limit.hard && *limit.hard < k_plenty
                      ? "raise the hard limit (limits.conf, or docker run --ulimit nofile=65536)"
                      : "ulimit -n " + text_of(limit.hard ? limit.hard : 65536);
  return result;
}

finding judge_locked_memory(const limit_pair& limit, bool infiniband) {
  finding result{.found = bytes_of(limit.soft)};
  if (!limit.soft) return result;
  if (!infiniband) {
    result.meaning = "CUDA's host memory does not count; network cards would, and there are none";
    return result;
  }
  result.level = status::warn;
  result.meaning = "memory registered with the InfiniBand cards here counts, and goes no further";
  result.remedy = "ulimit -l unlimited (limits.conf, or docker run --ulimit memlock=-1)";
  return result;
}

finding judge_address_space(const limit_pair& limit, bool reserved) {
  finding result{.found = fmt::format("limit {}, 4 TiB {}", bytes_of(limit.soft),
                                      reserved ? "can be reserved" : "cannot be reserved")};
  if (reserved) return result;
  result.level = status::fail;
  result.meaning = "regions reserve their largest size in addresses, without memory";
  result.remedy = limit.soft ? "ulimit -v unlimited"
                             : "check vm.overcommit_memory and what limits this container";
  return result;
}

finding judge_overcommit(int mode) {
  finding result{.found = fmt::format("vm.overcommit_memory={}", mode)};
  if (mode != 2) return result;
  result.level = status::warn;
  result.meaning =
      "the kernel counts memory that is never touched: the host driver's devices may "
      "be refused, and programs with it";
  result.remedy = "sysctl vm.overcommit_memory=0";
  return result;
}

finding judge_map_count(long most) {
  finding result{.found = fmt::format("vm.max_map_count={}", most)};
  if (most >= 65530) return result;
  result.level = status::warn;
  result.meaning = "each mapped segment is one mapping of the process, or more";
  result.remedy = "sysctl vm.max_map_count=65530";
  return result;
}

finding judge_shared_memory(std::optional<std::size_t> total, std::size_t free) {
  finding result;
  result.remedy = "docker run --shm-size=8g (or --ipc=host); else remount /dev/shm larger";
  if (!total) {
    result.level = status::fail;
    result.found = "no /dev/shm";
    result.meaning = "NCCL and MPI exchange data within the node through it";
    return result;
  }
  result.found = fmt::format("{} of {} free", format_bytes(free), format_bytes(*total));
  if (free >= 1_GiB) {
    result.remedy.clear();
    return result;
  }
  // NCCL takes some 10 MiB a pair of ranks; Docker gives 64 MiB.
  result.level = free < 32_MiB ? status::fail : status::warn;
  result.meaning =
      "NCCL and MPI exchange data within the node through it, and fail when it is full";
  return result;
}

finding judge_memory_limit(std::optional<std::size_t> limit, std::size_t used,
                           std::size_t physical) {
  if (!limit || *limit >= physical) {
    return {.found = fmt::format("none below the machine's {}", format_bytes(physical))};
  }
  finding result{.found = fmt::format("{} of {} used, of a machine with {}", format_bytes(used),
                                      format_bytes(*limit), format_bytes(physical))};
  result.level = *limit - std::min(*limit, used) < 256_MiB ? status::fail : status::warn;
  result.meaning =
      "the host tier must stay below it: past it the kernel ends processes instead of "
      "refusing memory, and free memory of the nodes does not show it";
  result.remedy = "raise the container's or job's memory limit, or bound the host tier";
  return result;
}

finding judge_allocator_options(const std::string& refused, const std::string& options) {
  if (refused.empty()) return {.found = options.empty() ? "the defaults" : options};
  return {.level = status::fail,
          .found = refused,
          .meaning = "allocators that read their options from this environment are not made",
          .remedy = "correct what the message names, or unset the variable"};
}

finding judge_timeout(const std::string& refused, long timeout_ms) {
  if (refused.empty()) return {.found = fmt::format("{} ms", timeout_ms)};
  return {.level = status::fail,
          .found = refused,
          .meaning = "jobs with a rank that has this environment end when they begin",
          .remedy = "correct the variable, or unset it"};
}

std::optional<cgroup_path> parse_cgroup(std::string_view text) {
  std::optional<cgroup_path> found;
  while (!text.empty()) {
    const auto end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == line.npos || second == line.npos) continue;
    const std::string_view controllers = line.substr(first + 1, second - first - 1);
    const std::string path(line.substr(second + 1));
    // Version 1 wins where both are mounted: then the memory controller is there.
    if (("," + std::string(controllers) + ",").find(",memory,") != std::string::npos) {
      return cgroup_path{.path = path, .unified = false};
    }
    if (controllers.empty()) found = cgroup_path{.path = path, .unified = true};
  }
  return found;
}

std::optional<std::size_t> parse_cgroup_limit(std::string_view text) {
  std::size_t bytes = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), bytes);
  if (parsed.ec != std::errc{} || bytes >= (std::size_t{1} << 62)) return std::nullopt;
  return bytes;
}

finding check_open_files() {
  return judge_open_files(read_limit(RLIMIT_NOFILE));
}

finding check_locked_memory() {
  return judge_locked_memory(read_limit(RLIMIT_MEMLOCK), has_entries("/sys/class/infiniband"));
}

finding check_address_space() {
  constexpr std::size_t k_bytes = 4_TiB;
  void* const at =
      ::mmap(nullptr, k_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at != MAP_FAILED) ::munmap(at, k_bytes);
  return judge_address_space(read_limit(RLIMIT_AS), at != MAP_FAILED);
}

finding check_overcommit() {
  const auto mode = read_number("/proc/sys/vm/overcommit_memory");
  return mode ? judge_overcommit(static_cast<int>(*mode)) : finding{.found = "not told"};
}

finding check_map_count() {
  const auto most = read_number("/proc/sys/vm/max_map_count");
  return most ? judge_map_count(*most) : finding{.found = "not told"};
}

finding check_shared_memory() {
  struct statvfs found {};
  if (::statvfs("/dev/shm", &found) != 0) return judge_shared_memory(std::nullopt, 0);
  return judge_shared_memory(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize);
}

finding check_memory_limit() {
  struct sysinfo machine {};
  ::sysinfo(&machine);
  const std::size_t physical = machine.totalram * machine.mem_unit;
  const auto group = parse_cgroup(read_text("/proc/self/cgroup").value_or(""));
  if (!group) return {.found = "no control group is told"};
  const group_memory memory = read_group(*group);
  return judge_memory_limit(memory.limit, memory.used, physical);
}

finding check_huge_pages() {
  return {.found = fmt::format("{} reserved", read_number("/proc/sys/vm/nr_hugepages").value_or(0)),
          .meaning = "not needed: CUDA takes large pages for the host tier by itself"};
}

finding check_allocator_options() {
  std::string options;
  const std::string refused = failure_of([&] { options = to_string(options_from_environment()); });
  return judge_allocator_options(refused, options);
}

finding check_timeout() {
  std::chrono::milliseconds timeout{0};
  const std::string refused = failure_of([&] { timeout = timeout_from_environment(); });
  return judge_timeout(refused, timeout.count());
}

}  // namespace evmm::cli
