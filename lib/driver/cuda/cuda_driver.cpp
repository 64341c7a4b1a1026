// SPDX-License-Identifier: Apache-2.0
#include "lib/driver/cuda/cuda_driver.hpp"

#include "lib/driver/cuda/cuda_error.hpp"
#include "lib/driver/cuda/nvml.hpp"
#include "lib/support/format.hpp"
#include "lib/support/log.hpp"
#include "lib/support/node_memory.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <fstream>
#include <utility>

namespace evmm {

namespace {

/// An attribute, or `otherwise` on a driver that does not know it.
int attribute(const cuda_api& api, CUdevice device, CUdevice_attribute which, int otherwise = 0) {
  int value = 0;
  return api.device_get_attribute(&value, which, device) == CUDA_SUCCESS ? value : otherwise;
}

/// "580.159.04", which libcuda does not tell; empty where the kernel module does not either.
std::string kernel_module_version() {
  std::string version;
  std::ifstream("/sys/module/nvidia/version") >> version;
  return version;
}

std::size_t granularity_of(const cuda_api& api, const CUmemAllocationProp& properties) {
  std::size_t bytes = 0;
  const CUresult result =
      api.mem_get_granularity(&bytes, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  return result == CUDA_SUCCESS ? bytes : 0;
}

std::vector<CUdevice> all_devices(const cuda_library& library) {
  std::vector<CUdevice> devices(static_cast<std::size_t>(library.devices));
  for (int i = 0; i < library.devices; ++i) {
    check(library.api, library.api.device_get(&devices[static_cast<std::size_t>(i)], i),
          [&] { return fmt::format("open DEVICE {}", i); });
  }
  return devices;
}

}  // namespace

bool cuda_available(std::string* why_not) {
  const cuda_library& library = load_cuda();
  if (!library.why_not.empty() && why_not != nullptr) *why_not = library.why_not;
  return library.why_not.empty();
}

std::shared_ptr<driver> make_cuda_driver() {
  const cuda_library& library = load_cuda();
  if (!library.why_not.empty()) {
    throw unsupported(library.why_not, library.help, library.native_code);
  }
  return std::make_shared<cuda_driver>(library);
}

cuda_driver::cuda_driver(const cuda_library& library)
    : library_(library),
      api_(library.api),
      nodes_(nodes_with_memory()),
      contexts_(library.api, all_devices(library)),
      pool_kept_(std::make_unique<std::atomic<bool>[]>(static_cast<std::size_t>(library.devices))) {
  for (int i = 0; i < library.devices; ++i) devices_.push_back(look_at(i));

  allocation_request on_host{.where = memory_location::on(nodes_.front())};
  host_granularity_ = granularity_of(api_, properties(on_host));
  unit_ = host_granularity_;
  for (const device_entry& each : devices_) unit_ = std::max(unit_, each.granularity);
  if (unit_ == 0) throw driver_error("the CUDA driver tells no granularity of its memory");
}

cuda_driver::~cuda_driver() {
  // In a forked child they are the parent's. Where a function that held the last reference goes,
  // CUDA may not be called: they live as long as the process.
  if (process_.forked() || in_host_function()) {
    contexts_.abandon();
    return;
  }
  const auto [ranges, handles, mappings] = ledger_.alive();
  const std::size_t pinned = pinned_.count() + registered_.count();
  if (ranges + handles + mappings + pinned + async_.count() != 0) {
    log().warn(
        "the CUDA driver goes with {} reserved ranges, {} handles, {} mappings, {} pieces of "
        "pinned "
        "and {} of stream-ordered memory alive",
        ranges, handles, mappings, pinned, async_.count());
  }
}

cuda_driver::device_entry cuda_driver::look_at(int ordinal) const {
  device_entry found;
  check(api_, api_.device_get(&found.device, ordinal),
        [&] { return fmt::format("open DEVICE {}", ordinal); });
  const auto has = [&](CUdevice_attribute which) {
    return attribute(api_, found.device, which) != 0;
  };
  const auto doing = [&] { return fmt::format("describe DEVICE {}", ordinal); };
  device_description& told = found.description;
  told.id = device_id{ordinal};

  std::array<char, 256> text{};
  check(api_, api_.device_get_name(text.data(), static_cast<int>(text.size()), found.device),
        doing);
  told.name = text.data();
  check(api_, api_.device_get_pci_bus_id(text.data(), static_cast<int>(text.size()), found.device),
        doing);
  told.pci_bus_id = text.data();
  std::transform(told.pci_bus_id.begin(), told.pci_bus_id.end(), told.pci_bus_id.begin(),
                 [](unsigned char letter) { return static_cast<char>(std::tolower(letter)); });
  check(api_, api_.device_total_mem(&told.total_bytes, found.device), doing);
  told.multiprocessors = attribute(api_, found.device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);

  const int node = attribute(api_, found.device, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, -1);
  if (node >= 0) told.host_node = numa_node{node};
  told.rdma_capable = has(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
  told.host_memory = has(CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
  found.virtual_memory = has(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
  found.fd_sharing = has(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
  found.fabric_sharing = has(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED);

  if (found.virtual_memory) {
    CUmemAllocationProp largest{};
    largest.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    largest.location = {CU_MEM_LOCATION_TYPE_DEVICE, found.device};
    largest.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    largest.allocFlags.gpuDirectRDMACapable = told.rdma_capable ? 1 : 0;
    found.granularity = granularity_of(api_, largest);
  }
  return found;
}

driver_info cuda_driver::info() const {
  check_caller();
  const std::string module = kernel_module_version();
  return {
      .kind = driver_kind::cuda,
      .name = "cuda",
      .version = cuda_version_text(library_.version) + (module.empty() ? "" : " (" + module + ")"),
      .fd_sharing = std::all_of(devices_.begin(), devices_.end(),
                                [](const device_entry& each) { return each.fd_sharing; }),
      .fabric_sharing = fabric_works()};
}

int cuda_driver::device_count() const {
  check_caller();
  return library_.devices;
}

void cuda_driver::throw_in_host_function() {
  throw invalid_argument("a function launched on a stream called the driver",
                         "call it from the thread that launches");
}

const cuda_driver::device_entry& cuda_driver::entry(device_id device,
                                                    std::source_location where) const {
  if (device.value < 0 || device.value >= library_.devices) {
    throw invalid_argument(
        fmt::format("there is no DEVICE {}: this process sees {}", device.value, library_.devices),
        "devices are counted after CUDA_VISIBLE_DEVICES", 0, where);
  }
  return devices_[static_cast<std::size_t>(device.value)];
}

void cuda_driver::check_node(int node, std::source_location where) const {
  // The list is all there is to go by; where sysfs is hidden it is made up, and CUDA decides.
  const bool listed = std::find(nodes_.begin(), nodes_.end(), numa_node{node}) != nodes_.end();
  if (node >= 0 && (listed || !sysfs_lists_nodes())) return;
  std::vector<int> numbers;
  for (const numa_node each : nodes_) numbers.push_back(each.value);
  throw invalid_argument(fmt::format("there is no HOST_NUMA {} with memory: the nodes are {}", node,
                                     fmt::join(numbers, ", ")),
                         "driver::numa_nodes() lists them", 0, where);
}

device_description cuda_driver::describe(device_id device) const {
  check_caller();
  return entry(device).description;
}

memory_usage cuda_driver::usage(memory_location where) const {
  check_caller();
  if (where.kind == tier::host) {
    check_node(where.index);
    const auto found = node_memory(numa_node{where.index});
    if (found) return *found;
    throw driver_error(
        fmt::format("the kernel does not tell the memory of HOST_NUMA {}", where.index),
        "check that /sys/devices/system/node can be read");
  }
  const device_id device{where.index};
  entry(device);
  const outside_capture relaxed(api_);
  const auto current = context_scope::of(contexts_, device);
  memory_usage found;
  check(api_, api_.mem_get_info(&found.free_bytes, &found.total_bytes),
        [&] { return "ask for the free memory of " + to_string(where); });
  return found;
}

std::vector<process_usage> cuda_driver::processes(device_id device) const {
  check_caller();
  return processes_on(entry(device).description.pci_bus_id);
}

bool cuda_driver::can_access(device_id from, device_id to) const {
  check_caller();
  const CUdevice accessor = entry(from).device;
  const CUdevice owner = entry(to).device;
  if (from == to) return true;
  int can = 0;
  check(api_, api_.device_can_access_peer(&can, accessor, owner), [&] {
    return fmt::format("ask whether DEVICE {} reaches DEVICE {}", from.value, to.value);
  });
  return can != 0;
}

bool cuda_driver::kernels_reach(address at) const {
  check_caller();
  if (at == 0) return false;
  const auto current = context_scope::any(contexts_);
  unsigned type = 0;
  const CUresult result = api_.pointer_get_attribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, at);
  if (result == CUDA_ERROR_INVALID_VALUE) return false;  // ordinary memory
  check(api_, result, [&] { return "ask what lies at " + format_address(at); });
  return true;
}

std::optional<device_id> cuda_driver::current_device() const {
  check_caller();
  CUcontext context = nullptr;
  CUdevice current = 0;
  if (api_.ctx_get_current(&context) != CUDA_SUCCESS || context == nullptr) return std::nullopt;
  if (api_.ctx_get_device(&current) != CUDA_SUCCESS) return std::nullopt;
  for (std::size_t i = 0; i < devices_.size(); ++i) {
    if (devices_[i].device == current) return device_id{static_cast<int>(i)};
  }
  return std::nullopt;
}

void cuda_driver::set_current_device(std::optional<device_id> device) {
  check_caller();
  if (device) entry(*device);
  check(api_, api_.ctx_set_current(device ? contexts_.of(*device) : nullptr), [&] {
    return device ? fmt::format("make DEVICE {} current", device->value)
                  : std::string("leave the thread without a device");
  });
}

std::vector<numa_node> cuda_driver::numa_nodes() const {
  check_caller();
  return nodes_;
}

bool cuda_driver::fabric_works() const {
  std::call_once(fabric_once_, [this] { fabric_works_ = prove_fabric(); });
  return fabric_works_;
}

bool cuda_driver::prove_fabric() const {
  if (!devices_.front().fabric_sharing) return false;
  allocation_request request{.bytes = devices_.front().granularity,
                             .where = memory_location::on(device_id{0}),
                             .share = share_kind::fabric};
  const CUmemAllocationProp wanted = properties(request);
  const outside_capture relaxed(api_);
  const auto current = context_scope::existing(contexts_);
  CUmemGenericAllocationHandle made = 0;
  CUmemGenericAllocationHandle imported = 0;
  CUmemFabricHandle shared{};
  CUresult result = api_.mem_create(&made, request.bytes, &wanted, 0);
  if (result != CUDA_SUCCESS) {
    log().debug("no fabric handles: {}", error_text(api_, result));
    return false;
  }
  result = api_.mem_export(&shared, made, CU_MEM_HANDLE_TYPE_FABRIC, 0);
  if (result == CUDA_SUCCESS) {
    result = api_.mem_import(&imported, &shared, CU_MEM_HANDLE_TYPE_FABRIC);
  }
  if (result == CUDA_SUCCESS) api_.mem_release(imported);
  api_.mem_release(made);
  if (result != CUDA_SUCCESS) log().debug("no fabric handles: {}", error_text(api_, result));
  return result == CUDA_SUCCESS;
}

}  // namespace evmm
