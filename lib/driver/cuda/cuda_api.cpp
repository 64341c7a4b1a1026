// SPDX-License-Identifier: Apache-2.0
#include "lib/driver/cuda/cuda_api.hpp"

#include "lib/driver/cuda/cuda_error.hpp"
#include "lib/support/environment.hpp"
#include "lib/support/fork_guard.hpp"

#include <fmt/format.h>

#include <dlfcn.h>

namespace evmm {

namespace {

/// The oldest driver evmm runs on: HOST_NUMA memory came with 12.2, fabric handles with 12.3, and
/// 12.4 is the oldest toolkit evmm is built with.
constexpr int k_least_version = 12040;
constexpr const char* k_least_driver = "550";  // the branch of NVIDIA's driver that brought it

/// A failed step, as load() reports it.
cuda_library cannot(std::string why_not, std::string help = {}, int native_code = 0) {
  cuda_library result;
  result.why_not = std::move(why_not);
  result.help = std::move(help);
  result.native_code = native_code;
  return result;
}

const char* help_for_init(CUresult result) {
  switch (result) {
    case CUDA_ERROR_STUB_LIBRARY:
      return "the toolkit's stub was loaded: take its directory out of LD_LIBRARY_PATH";
    case CUDA_ERROR_NO_DEVICE:
      return "check nvidia-smi and CUDA_VISIBLE_DEVICES; in a container, that it was started with "
             "GPUs (docker run --gpus all)";
    case CUDA_ERROR_NOT_INITIALIZED:
      return "CUDA cannot be used in a child of fork when the parent has used it: start children "
             "with exec (spawn)";
    case CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:
    case CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE:
      return "libcuda and the kernel module are of different versions: reboot after an update, or "
             "take a compat libcuda out of LD_LIBRARY_PATH";
    case CUDA_ERROR_SYSTEM_NOT_READY:
      return "start the services this system needs, such as nvidia-fabricmanager on NVSwitch";
    default:
      return "check nvidia-smi and the kernel's log (dmesg)";
  }
}

template <class Function>
Function symbol(void* library, const char* name) {
  return reinterpret_cast<Function>(::dlsym(library, name));
}

bool any_virtual_memory(const cuda_library& library) {
  for (int i = 0; i < library.devices; ++i) {
    CUdevice device = 0;
    int has = 0;
    const bool told =
        library.api.device_get(&device, i) == CUDA_SUCCESS &&
        library.api.device_get_attribute(
            &has, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device) == CUDA_SUCCESS;
    if (told && has != 0) return true;
  }
  return false;
}

cuda_library load() {
  void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    // NOLINTNEXTLINE(concurrency-mt-unsafe): glibc keeps the text per thread
    const char* const text = ::dlerror();
    return cannot(fmt::format("no CUDA driver: {}", text != nullptr ? text : "libcuda.so.1"),
                  fmt::format("install NVIDIA's driver, {} or later", k_least_driver));
  }

  // Before cuInit and before the table, so that an old driver is told from a broken one.
  int version = 0;
  const auto get_version = symbol<PFN_cuDriverGetVersion_v2020>(library, "cuDriverGetVersion");
  const CUresult told = get_version != nullptr ? get_version(&version) : CUDA_ERROR_NOT_FOUND;
  if (told == CUDA_ERROR_STUB_LIBRARY) {
    return cannot("no CUDA driver: libcuda.so.1 is the toolkit's stub", help_for_init(told), told);
  }
  const auto get_address = symbol<PFN_cuGetProcAddress_v12000>(library, "cuGetProcAddress_v2");
  if (version < k_least_version || get_address == nullptr) {
    return cannot(fmt::format("the CUDA driver is of version {}; evmm needs {} or later",
                              cuda_version_text(version), cuda_version_text(k_least_version)),
                  fmt::format("update NVIDIA's driver to {} or later", k_least_driver));
  }

  cuda_library loaded;
  loaded.version = version;
  std::string missing;
  const auto find = [&](auto& function, const char* name, int of_version) {
    void* found = nullptr;
    CUdriverProcAddressQueryResult status{};
    const CUresult result =
        get_address(name, &found, of_version, CU_GET_PROC_ADDRESS_LEGACY_STREAM, &status);
    if (result != CUDA_SUCCESS || found == nullptr) missing += std::string(" ") + name;
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found);
  };
#define EVMM_CUDA_FIND(member, symbol, version) find(loaded.api.member, #symbol, version);
  EVMM_CUDA_ENTRY_POINTS(EVMM_CUDA_FIND)
#undef EVMM_CUDA_FIND
  if (!missing.empty()) {
    return cannot(fmt::format("the CUDA driver ({}) has no{}", cuda_version_text(version), missing),
                  fmt::format("update NVIDIA's driver to {} or later", k_least_driver));
  }

  const cuda_api& api = loaded.api;
  CUresult result = api.init(0);
  if (result == CUDA_SUCCESS) result = api.device_get_count(&loaded.devices);
  if (result == CUDA_SUCCESS && loaded.devices == 0) result = CUDA_ERROR_NO_DEVICE;
  if (result != CUDA_SUCCESS) {
    const auto visible = environment("CUDA_VISIBLE_DEVICES");
    return cannot(fmt::format("CUDA does not start: {}{}", error_text(api, result),
                              visible ? " (CUDA_VISIBLE_DEVICES=" + *visible + ")" : ""),
                  help_for_init(result), result);
  }
  if (!any_virtual_memory(loaded)) {
    return cannot("no GPU here has virtual memory management",
                  "evmm needs compute capability 7.0 or later, and a virtual GPU that offers it");
  }
  return loaded;
}

}  // namespace

const cuda_library& load_cuda() {
  // Never destroyed: objects that outlive main still give memory back through it.
  struct first_load {
    fork_guard process;
    cuda_library library = load();
  };
  static const auto* const first = new first_load;
  const bool usable = first->library.why_not.empty();
  if (!usable || !first->process.forked()) return first->library;
  static const auto* const in_child =
      new cuda_library(cannot("CUDA was started before this process was forked",
                              help_for_init(CUDA_ERROR_NOT_INITIALIZED)));
  return *in_child;
}

std::string cuda_version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

}  // namespace evmm
