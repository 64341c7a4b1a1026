// SPDX-License-Identifier: Apache-2.0
#include "lib/driver/cuda/nvml.hpp"

#include "lib/support/log.hpp"

#include <algorithm>
#include <type_traits>

#include <dlfcn.h>
#include <unistd.h>

namespace evmm {

namespace {

// The four functions used, as nvml.h declares them: the toolkit need not have that header.
using nvml_device = struct nvmlDevice_st*;
struct nvml_process {  // nvmlProcessInfo_v2_t
  unsigned pid;
  unsigned long long used_bytes;
  unsigned gpu_instance;
  unsigned compute_instance;
};
constexpr int k_success = 0;
constexpr int k_insufficient_size = 7;
constexpr unsigned long long k_not_available = ~0ULL;

struct nvml_api {
  int (*init)() = nullptr;
  int (*device_by_bus)(const char*, nvml_device*) = nullptr;
  int (*compute_processes)(nvml_device, unsigned*, nvml_process*) = nullptr;
  int (*graphics_processes)(nvml_device, unsigned*, nvml_process*) = nullptr;
  bool usable = false;
};

nvml_api load() {
  nvml_api found;
  void* const library = ::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return found;
  const auto find = [&](auto& function, const char* name) {
    function =
        reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, name));
    return function != nullptr;
  };
  const bool whole = find(found.init, "nvmlInit_v2") &&
                     find(found.device_by_bus, "nvmlDeviceGetHandleByPciBusId_v2") &&
                     find(found.compute_processes, "nvmlDeviceGetComputeRunningProcesses_v3") &&
                     find(found.graphics_processes, "nvmlDeviceGetGraphicsRunningProcesses_v3");
  found.usable = whole && found.init() == k_success;
  if (!found.usable) log().debug("NVML is there and does not work: no use of devices by process");
  return found;
}

/// Adds what one of the two lists tells; a process may be in both.
void add(int (*list)(nvml_device, unsigned*, nvml_process*), nvml_device device,
         std::vector<process_usage>& found) {
  std::vector<nvml_process> told(64);
  int result = k_insufficient_size;
  unsigned count = 0;
  while (result == k_insufficient_size && told.size() <= 65536) {
    count = static_cast<unsigned>(told.size());
    result = list(device, &count, told.data());
    if (result == k_insufficient_size) told.resize(2 * told.size());
  }
  if (result != k_success) return;
  for (unsigned i = 0; i < count; ++i) {
    const int pid = static_cast<int>(told[i].pid);
    const bool known = std::any_of(found.begin(), found.end(),
                                   [&](const process_usage& each) { return each.pid == pid; });
    if (known) continue;
    const auto bytes = told[i].used_bytes == k_not_available ? 0 : told[i].used_bytes;
    found.push_back({.pid = pid,
                     .bytes = static_cast<std::size_t>(bytes),
                     .this_process = pid == static_cast<int>(::getpid())});
  }
}

}  // namespace

std::vector<process_usage> processes_on(const std::string& pci_bus_id) {
  static const nvml_api api = load();
  std::vector<process_usage> found;
  nvml_device device = nullptr;
  if (!api.usable || api.device_by_bus(pci_bus_id.c_str(), &device) != k_success) return found;
  add(api.compute_processes, device, found);
  add(api.graphics_processes, device, found);
  return found;
}

}  // namespace evmm
