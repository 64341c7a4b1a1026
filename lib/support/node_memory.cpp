// SPDX-License-Identifier: Apache-2.0
#include "lib/support/node_memory.hpp"

#include "lib/support/text_file.hpp"

#include <algorithm>
#include <charconv>

namespace evmm {

namespace {

/// The bytes of the line "Node 0 <key>   123 kB", or of "<key>   123 kB" as /proc/meminfo has it.
std::optional<std::size_t> field(std::string_view text, std::string_view key) {
  for (auto at = text.find(key); at != text.npos; at = text.find(key, at + 1)) {
    const auto end = at + key.size();
    const bool whole = at == 0 || text[at - 1] == ' ' || text[at - 1] == '\n';
    if (!whole || end == text.size() || text[end] != ':') continue;
    const auto digits = text.find_first_of("0123456789", end);
    if (digits == text.npos) return std::nullopt;
    std::size_t kilobytes = 0;
    std::from_chars(text.data() + digits, text.data() + text.size(), kilobytes);
    return kilobytes << 10;
  }
  return std::nullopt;
}

}  // namespace

std::vector<int> parse_kernel_list(std::string_view text) {
  std::vector<int> numbers;
  const char* at = text.data();
  const char* const end = at + text.size();
  while (at != end && *at != '\n') {
    int first = 0;
    auto parsed = std::from_chars(at, end, first);
    if (parsed.ec != std::errc{}) return {};
    int last = first;
    if (parsed.ptr != end && *parsed.ptr == '-') {
      parsed = std::from_chars(parsed.ptr + 1, end, last);
      if (parsed.ec != std::errc{} || last < first) return {};
    }
    for (int i = first; i <= last; ++i) numbers.push_back(i);
    at = parsed.ptr;
    if (at != end && *at == ',') ++at;
  }
  return numbers;
}

std::vector<numa_node> nodes_with_memory(const std::string& sysfs) {
  std::vector<numa_node> nodes;
  for (const int number : parse_kernel_list(read_text(sysfs + "/has_memory").value_or(""))) {
    nodes.push_back({number});
  }
  // A kernel without NUMA, or a sandbox without sysfs: all memory is node 0.
  if (nodes.empty()) nodes.push_back({0});
  std::sort(nodes.begin(), nodes.end());
  return nodes;
}

bool sysfs_lists_nodes(const std::string& sysfs) {
  return read_text(sysfs + "/has_memory").has_value();
}

std::optional<memory_usage> parse_node_meminfo(std::string_view text) {
  const auto total = field(text, "MemTotal");
  const auto free = field(text, "MemFree");
  if (!total || !free) return std::nullopt;
  const std::size_t reclaimable = field(text, "Active(file)").value_or(0) +
                                  field(text, "Inactive(file)").value_or(0) +
                                  field(text, "SReclaimable").value_or(0);
  return memory_usage{.free_bytes = std::min(*total, *free + reclaimable), .total_bytes = *total};
}

std::optional<memory_usage> node_memory(numa_node node, const std::string& sysfs) {
  const auto text = read_text(sysfs + "/node" + std::to_string(node.value) + "/meminfo");
  if (text) return parse_node_meminfo(*text);
  if (node.value != 0) return std::nullopt;
  const auto whole = read_text("/proc/meminfo");
  return whole ? parse_node_meminfo(*whole) : std::nullopt;
}

}  // namespace evmm
