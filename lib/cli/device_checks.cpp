// SPDX-License-Identifier: Apache-2.0
#include "lib/cli/device_checks.hpp"

#include "lib/support/nccl_version.hpp"
#include "lib/support/text_file.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>

namespace evmm::cli {

namespace {

namespace fs = std::filesystem;

std::vector<std::string> entries(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code failure;
  for (fs::directory_iterator at(folder, failure), end; !failure && at != end;
       at.increment(failure)) {
    names.push_back(at->path().filename());
  }
  return names;
}

/// NVIDIA's display and 3D controllers on the PCI bus.
int gpus_on_the_bus() {
  const std::string root = "/sys/bus/pci/devices/";
  const auto names = entries(root);
  return static_cast<int>(std::count_if(names.begin(), names.end(), [&](const std::string& name) {
    return read_line(root + name + "/vendor") == "0x10de" &&
           read_line(root + name + "/class").value_or("").rfind("0x03", 0) == 0;
  }));
}

/// Whether this is a real machine with CUDA, not the host driver's pretence.
bool on_cuda(const machine& here) {
  return here.on != nullptr && here.on->info().kind == driver_kind::cuda;
}

/// The answer to a question about real GPUs where there are none.
finding no_gpus(const machine& here) {
  return {.found = here.on == nullptr ? "no driver" : "host driver: does not apply"};
}

}  // namespace

finding judge_gpu_driver(bool cuda, const std::string& why_not, int gpus) {
  if (cuda) return {.found = "works"};
  finding result{.level = status::warn, .found = why_not};
  if (gpus == 0) {
    result.meaning = "no GPU is seen: programs use the host driver, for development and tests";
    result.remedy = "on a machine with GPUs, start the container with them (docker run --gpus all)";
    return result;
  }
  result.level = status::fail;
  result.found += fmt::format("; {} NVIDIA GPUs are on the PCI bus", gpus);
  result.meaning = "programs would silently use the host driver";
  result.remedy =
      "install NVIDIA's driver 550 or later, and see nvidia-smi; in a container, start "
      "it with the GPUs";
  return result;
}

finding judge_fabric(bool proved, bool channel_files) {
  if (proved) return {.found = "handles can be created, exported and imported"};
  return {.found = channel_files ? "no handles, though there are IMEX channel files"
                                 : "no handles; no IMEX channel files",
          .meaning =
              "memory is shared by descriptor within a node; over NVLink between nodes it "
              "cannot be",
          .remedy =
              "only where NVLink joins nodes: run nvidia-imex, and give the container "
              "/dev/nvidia-caps-imex-channels/channel0"};
}

finding judge_peers(const std::vector<std::vector<bool>>& reaches) {
  if (reaches.size() < 2) return {.found = "one device"};
  std::vector<std::string> apart;
  for (std::size_t from = 0; from < reaches.size(); ++from) {
    for (std::size_t to = 0; to < reaches[from].size(); ++to) {
      if (!reaches[from][to]) apart.push_back(fmt::format("{} to {}", from, to));
    }
  }
  if (apart.empty()) return {.found = "every device reaches every other"};
  return {.level = status::warn,
          .found = fmt::format("no access from {}", fmt::join(apart, ", ")),
          .meaning = "kernels cannot load from or store to those peers' device segments",
          .remedy =
              "see nvidia-smi topo -m; keep shared segments in the host tier, or use GPUs "
              "joined by NVLink or one PCIe switch"};
}

finding judge_locality(const std::vector<int>& unknown, std::size_t nodes) {
  if (unknown.empty()) return {.found = "known for every device"};
  finding result{.found = fmt::format("unknown for DEVICE {}", fmt::join(unknown, ", "))};
  if (nodes == 1) {
    result.meaning = "there is one node, so it does not matter";
    return result;
  }
  result.level = status::warn;
  result.meaning =
      "usual in virtual machines: the CUDA driver's hint decides the node of the host "
      "tier, then distance";
  result.remedy = "check `evmm info`; where it is wrong, name the nodes in host_placement";
  return result;
}

finding judge_allowed_nodes(const std::vector<node_description>& nodes) {
  if (nodes.empty()) {
    return {.level = status::warn,
            .found = "no node is told",
            .meaning =
                "locality, distance and what this process may use cannot be looked up: the "
                "driver's hint decides the node of the host tier, or its lowest node",
            .remedy = "let the container read /sys/devices/system"};
  }
  std::vector<int> refused;
  for (const auto& each : nodes) {
    if (!each.allowed) refused.push_back(each.node.value);
  }
  if (refused.empty()) return {.found = fmt::format("all {}", nodes.size())};
  return {
      .level = status::warn,
      .found = fmt::format("all but {}", fmt::join(refused, ", ")),
      .meaning = "host segments of GPUs near those nodes are placed farther away",
      .remedy = "widen the cpuset (numactl --membind, docker run --cpuset-mems, the scheduler)"};
}

finding judge_wsl(bool wsl) {
  if (!wsl) return {.found = "not WSL"};
  return {.level = status::warn,
          .found = "Windows Subsystem for Linux",
          .meaning = "no GPUDirect RDMA, and host memory in the address range may be refused",
          .remedy = "use Linux on the machine itself for jobs"};
}

finding judge_iommu(const std::vector<std::string>& group_types) {
  if (group_types.empty()) return {.found = "off, or hidden"};
  const bool translates =
      std::any_of(group_types.begin(), group_types.end(),
                  [](const std::string& type) { return type.rfind("DMA", 0) == 0; });
  finding result{.found = fmt::format("{}", fmt::join(group_types, ", "))};
  if (!translates) return result;
  result.level = status::warn;
  result.meaning =
      "it translates what GPUs read and write: peer access over PCIe and GPUDirect may "
      "be slow or wrong, NVLink is not affected";
  result.remedy = "boot with iommu=pt, or turn it off";
  return result;
}

finding judge_nccl(const library_versions& nccl, bool cuda) {
  // What windows over several handles and host segments need.
  constexpr int k_elastic = 23003;
  if (nccl.found.empty()) {
    return {.level = cuda && !nccl.compiled.empty() ? status::fail : status::ok,
            .found = "none: " + nccl.why_not,
            .meaning = "without it there are no NCCL windows",
            .remedy = cuda ? "install libnccl2, or name its file in EVMM_NCCL_LIBRARY" : ""};
  }
  const std::string found = fmt::format("{} ({})", nccl.found, nccl.path);
  const int code = nccl_version_code(nccl.found);
  if (code < nccl_version_code(nccl.compiled)) {
    return {.level = status::warn,
            .found = found,
            .meaning = "evmm was built with " + nccl.compiled + ", which is newer",
            .remedy = "load the newer one (LD_LIBRARY_PATH), or build with this one (NCCL_ROOT)"};
  }
  if (code < k_elastic) {
    return {.level = status::warn,
            .found = found,
            .meaning = "before 2.30.3 a window covers one device segment and no host segment",
            .remedy = "use NCCL 2.30.3 or later for windows over both tiers"};
  }
  if (code == nccl_version_code(nccl.compiled)) return {.found = found};
  // Kernels that use NCCL's network (GIN) run with no other NCCL.
  return {.found = fmt::format("{}, built with {}: between nodes by send and receive, not GIN",
                               found, nccl.compiled.empty() ? "none" : nccl.compiled)};
}

finding check_gpu_driver(const machine& here) {
  return judge_gpu_driver(here.cuda, here.cuda_why_not, gpus_on_the_bus());
}

finding check_driver_starts(const machine& here) {
  if (here.on == nullptr) {
    return {.level = status::fail,
            .found = here.driver_error,
            .meaning = "no program that uses evmm starts in this environment",
            .remedy = "correct what the message names, or unset EVMM_DRIVER"};
  }
  const driver_info told = here.on->info();
  return {.found =
              fmt::format("{} {}, {} devices", told.name, told.version, here.on->device_count())};
}

finding check_host_memory(const machine& here) {
  if (here.on == nullptr) return no_gpus(here);
  std::vector<int> without;
  for (const auto& each : here.devices()) {
    if (!each.host_memory) without.push_back(each.id.value);
  }
  if (without.empty()) return {.found = "every device maps it"};
  return {.level = status::warn,
          .found = fmt::format("not on DEVICE {}", fmt::join(without, ", ")),
          .meaning = "there is no host tier there: buffers end with the device's memory",
          .remedy = "update the driver; virtual GPUs and WSL may not offer it"};
}

finding check_fabric(const machine& here) {
  if (!on_cuda(here)) return no_gpus(here);
  return judge_fabric(here.on->info().fabric_sharing,
                      !entries("/dev/nvidia-caps-imex-channels").empty());
}

finding check_peers(const machine& here) {
  if (!on_cuda(here)) return no_gpus(here);
  std::vector<std::vector<bool>> reaches;
  for (int from = 0; from < here.on->device_count(); ++from) {
    auto& row = reaches.emplace_back();
    for (int to = 0; to < here.on->device_count(); ++to) {
      row.push_back(here.on->can_access(device_id{from}, device_id{to}));
    }
  }
  return judge_peers(reaches);
}

finding check_locality(const machine& here) {
  if (!here.map) {
    return {.level = status::warn,
            .found = here.topology_error,
            .meaning = "the node of the host tier cannot be chosen by locality",
            .remedy = "check that /sys can be read, and HWLOC_XMLFILE"};
  }
  if (!on_cuda(here)) return no_gpus(here);
  std::vector<int> unknown;
  for (const auto& each : here.devices()) {
    if (here.map->local_nodes(each.pci_bus_id).empty()) unknown.push_back(each.id.value);
  }
  return judge_locality(unknown, here.map->nodes().size());
}

finding check_allowed_nodes(const machine& here) {
  if (!here.map) return {.found = "not told"};
  return judge_allowed_nodes(here.map->nodes());
}

finding check_wsl(const machine& /*here*/) {
  const std::string kernel = read_line("/proc/version").value_or("");
  return judge_wsl(fs::exists("/dev/dxg") || kernel.find("icrosoft") != std::string::npos);
}

finding check_iommu(const machine& here) {
  if (!on_cuda(here)) return no_gpus(here);
  std::vector<std::string> types;
  for (const auto& each : here.devices()) {
    const auto type = read_line("/sys/bus/pci/devices/" + each.pci_bus_id + "/iommu_group/type");
    if (type && std::find(types.begin(), types.end(), *type) == types.end()) types.push_back(*type);
  }
  return judge_iommu(types);
}

finding check_nccl(const machine& here) {
  return judge_nccl(look_for_nccl(), here.cuda);
}

}  // namespace evmm::cli
