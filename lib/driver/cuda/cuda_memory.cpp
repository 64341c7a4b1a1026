// SPDX-License-Identifier: Apache-2.0
#include "lib/driver/cuda/cuda_driver.hpp"
#include "lib/driver/cuda/cuda_error.hpp"
#include "lib/support/format.hpp"
#include "lib/support/log.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

namespace evmm {

namespace {

CUmemGenericAllocationHandle native(allocation_handle handle) {
  return static_cast<CUmemGenericAllocationHandle>(handle);
}

CUmemAccess_flags native(access_kind kind) {
  switch (kind) {
    case access_kind::none:
      return CU_MEM_ACCESS_FLAGS_PROT_NONE;
    case access_kind::read:
      return CU_MEM_ACCESS_FLAGS_PROT_READ;
    case access_kind::read_write:
      break;
  }
  return CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
}

CUmemAllocationHandleType native(share_kind share) {
  switch (share) {
    case share_kind::none:
      return CU_MEM_HANDLE_TYPE_NONE;
    case share_kind::fabric:
      return CU_MEM_HANDLE_TYPE_FABRIC;
    case share_kind::fd:
      break;
  }
  return CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
}

CUmemLocation native(memory_location where) {
  CUmemLocation location{};
  location.type =
      where.kind == tier::device ? CU_MEM_LOCATION_TYPE_DEVICE : CU_MEM_LOCATION_TYPE_HOST_NUMA;
  location.id = where.index;
  return location;
}

constexpr const char* k_fabric_help =
    "fabric handles need NVLink between the GPUs and a permitted IMEX channel "
    "(/dev/nvidia-caps-imex-channels); share by descriptor within a node";

/// Whether the process may not open another descriptor: CUDA says only that something failed.
bool out_of_descriptors() {
  const unique_fd probe(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  return !probe && (errno == EMFILE || errno == ENFILE);
}

}  // namespace

CUmemAllocationProp cuda_driver::properties(const allocation_request& request) const {
  CUmemAllocationProp wanted{};
  wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  wanted.requestedHandleTypes = native(request.share);
  wanted.location = native(request.where);
  if (request.where.kind == tier::device) {
    const device_entry& on = entry(device_id{request.where.index});
    wanted.location.id = on.device;
    // Only where the device has it: elsewhere (WSL) the flag makes set_access fail later.
    wanted.allocFlags.gpuDirectRDMACapable = request.rdma && on.description.rdma_capable ? 1 : 0;
  }
  return wanted;
}

void cuda_driver::check_multiple(std::string_view what, std::size_t value, std::size_t unit) const {
  if (value != 0 && value % unit == 0) return;
  throw invalid_argument(fmt::format("{} is {} ({:#x}), not a multiple of the granularity {} and "
                                     "not 0",
                                     what, format_bytes(value), value, format_bytes(unit)),
                         "round up to driver::granularity()");
}

std::size_t cuda_driver::granularity(memory_location where) const {
  check_caller();
  std::size_t bytes = host_granularity_;
  if (where.kind == tier::device) {
    bytes = entry(device_id{where.index}).granularity;
  } else {
    check_node(where.index);
  }
  if (bytes == 0) {
    throw unsupported(
        to_string(where) + " has no virtual memory management",
        where.kind == tier::host
            ? "host segments need a GPU and driver with HOST_NUMA memory; use the device tier only"
            : "evmm needs a GPU of compute capability 7.0 or later, not in a virtualised mode that "
              "turns it off");
  }
  return bytes;
}

address cuda_driver::reserve(std::size_t bytes, std::size_t alignment, address hint) {
  check_caller();
  check_multiple("the size to reserve", bytes, unit_);
  if (alignment != 0 && !std::has_single_bit(alignment)) {
    throw invalid_argument(fmt::format("the alignment {:#x} is not a power of two", alignment));
  }
  if (hint % unit_ != 0) check_multiple("the address hint", hint, unit_);
  if (alignment < unit_) alignment = unit_;

  const outside_capture relaxed(api_);
  const auto current = context_scope::existing(contexts_);
  CUdeviceptr base = 0;
  CUresult result = api_.mem_address_reserve(&base, bytes, alignment, hint, 0);
  if (result != CUDA_SUCCESS && hint != 0) {
    result = api_.mem_address_reserve(&base, bytes, alignment, 0, 0);
  }
  if (result == CUDA_ERROR_OUT_OF_MEMORY) {
    throw driver_error(fmt::format("cannot reserve {} of addresses: {}", format_bytes(bytes),
                                   error_text(api_, result)),
                       "a process has about 128 TiB of addresses; reserve less, and check "
                       "ulimit -v",
                       result);
  }
  check(api_, result, [&] {
    return fmt::format("reserve {} of addresses aligned to {}", format_bytes(bytes),
                       format_bytes(alignment));
  });
  ledger_.add_range(base, bytes);
  return base;
}

void cuda_driver::free(address base, std::size_t bytes) {
  check_caller();
  ledger_.remove_range(base, bytes);
  const auto current = context_scope::existing(contexts_);
  const CUresult result = api_.mem_address_free(base, bytes);
  if (result != CUDA_SUCCESS) ledger_.add_range(base, bytes);
  check_return(api_, result, [&] {
    return fmt::format("free the {} reserved at {}", format_bytes(bytes), format_address(base));
  });
}

void cuda_driver::check_request(const allocation_request& request) const {
  check_multiple("the size to create", request.bytes, granularity(request.where));
  if (request.rdma && request.where.kind == tier::host) {
    throw invalid_argument("GPUDirect RDMA was asked for on " + to_string(request.where),
                           "it is a property of DEVICE memory; leave rdma false for host memory");
  }
}

allocation_handle cuda_driver::create(const allocation_request& request) {
  check_caller();
  check_request(request);
  const CUmemAllocationProp wanted = properties(request);
  const outside_capture relaxed(api_);
  const auto current = context_scope::existing(contexts_);
  CUmemGenericAllocationHandle made = 0;
  const CUresult result = api_.mem_create(&made, request.bytes, &wanted, 0);
  if (result != CUDA_SUCCESS) throw_create_error(result, request);
  const auto handle = static_cast<allocation_handle>(made);
  ledger_.add_handle(handle, request, false);
  return handle;
}

void cuda_driver::throw_create_error(CUresult result, const allocation_request& request) const {
  const bool on_host = request.where.kind == tier::host;
  const std::string doing =
      fmt::format("create {} on {}", format_bytes(request.bytes), to_string(request.where));
  switch (result) {
    case CUDA_ERROR_OUT_OF_MEMORY: {
      std::string room;
      log_failure("asking for free memory", [&] {
        const memory_usage found = usage(request.where);
        room = fmt::format("{} of {} free, ", format_bytes(found.free_bytes),
                           format_bytes(found.total_bytes));
      });
      throw out_of_memory(
          fmt::format("cannot {}: {}{} held there by this process", doing, room,
                      format_bytes(ledger_.held(request.where))),
          on_host ? "host memory is page-locked: ask for less, free or shrink other segments, try "
                    "another node, or raise the container's memory limit"
                  : "ask for less, free or shrink other segments, end other processes on the "
                    "device, or let the host tier take the rest",
          result);
    }
    case CUDA_ERROR_INVALID_VALUE:
      if (!on_host) break;
      throw invalid_argument(
          fmt::format("cannot {}: the node does not exist or may not be used: {}", doing,
                      error_text(api_, result)),
          "choose among driver::numa_nodes(), and those that the process's cpuset allows", result);
    case CUDA_ERROR_NOT_PERMITTED:
    case CUDA_ERROR_NOT_SUPPORTED:
      if (request.share != share_kind::fabric) break;
      throw_cuda_error(api_, result, doing + " with a fabric handle", k_fabric_help);
    default:
      break;
  }
  throw_cuda_error(api_, result, doing);
}

void cuda_driver::release(allocation_handle handle) {
  check_caller();
  auto what = ledger_.remove_handle(handle);
  const outside_capture relaxed(api_);
  const auto current = context_scope::existing(contexts_);
  const CUresult result = api_.mem_release(native(handle));
  if (result != CUDA_SUCCESS) ledger_.add_back(handle, std::move(what));
  check_return(api_, result, [] { return "release a handle"; });
}

void cuda_driver::map(address at, std::size_t bytes, allocation_handle handle) {
  check_caller();
  check_multiple("the address to map at", at, unit_);
  check_multiple("the size to map", bytes, unit_);
  ledger_.add_mapping(at, bytes, handle);
  const outside_capture relaxed(api_);
  const auto current = context_scope::existing(contexts_);
  const CUresult result = api_.mem_map(at, bytes, 0, native(handle), 0);
  if (result != CUDA_SUCCESS) ledger_.remove_mapping(at, bytes);
  check(api_, result,
        [&] { return fmt::format("map {} at {}", format_bytes(bytes), format_address(at)); });
}

void cuda_driver::unmap(address at, std::size_t bytes) {
  check_caller();
  auto taken = ledger_.remove_mapping(at, bytes);
  const outside_capture relaxed(api_);
  const auto current = context_scope::existing(contexts_);
  const CUresult result = api_.mem_unmap(at, bytes);
  if (result != CUDA_SUCCESS) ledger_.add_back(std::move(taken));
  check_return(api_, result, [&] {
    return fmt::format("unmap {} at {}", format_bytes(bytes), format_address(at));
  });
}

void cuda_driver::set_access(address at, std::size_t bytes, std::span<const access_grant> grants) {
  check_caller();
  check_multiple("the address to set access at", at, unit_);
  check_multiple("the size to set access to", bytes, unit_);
  std::vector<CUmemAccessDesc> wanted;
  bool by_cpu = false;
  for (const access_grant& grant : grants) {
    CUmemAccessDesc one{};
    one.location = native(grant.who);
    one.flags = native(grant.kind);
    if (grant.who.kind == tier::device) {
      one.location.id = entry(device_id{grant.who.index}).device;
    } else {
      check_node(grant.who.index);
      by_cpu = true;
    }
    wanted.push_back(one);
  }
  ledger_.check_access(at, bytes, by_cpu);
  if (wanted.empty()) return;
  const outside_capture relaxed(api_);
  const auto current = context_scope::existing(contexts_);
  check(api_, api_.mem_set_access(at, bytes, wanted.data(), wanted.size()), [&] {
    std::string who;
    for (const access_grant& grant : grants) {
      who += (who.empty() ? "" : ", ") + to_string(grant.who);
    }
    return fmt::format("give {} access to {} at {}", who, format_bytes(bytes), format_address(at));
  });
}

unique_fd cuda_driver::export_fd(allocation_handle handle) {
  check_caller();
  const auto what = ledger_.find(handle);
  if (what->request.share != share_kind::fd) {
    throw invalid_argument("cannot export a descriptor of a handle that was not created for it",
                           "create it with share_kind::fd");
  }
  const outside_capture relaxed(api_);
  const auto current = context_scope::existing(contexts_);
  int fd = -1;
  const CUresult result =
      api_.mem_export(&fd, native(handle), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  if (result != CUDA_SUCCESS && out_of_descriptors()) {
    throw driver_error("cannot export a descriptor: too many are open",
                       "raise the limit (ulimit -n), or use fewer, larger segments", result);
  }
  check(api_, result, [] { return "export a descriptor"; });
  unique_fd exported(fd);
  // A program started later must not keep the memory alive.
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  return exported;
}

allocation_handle cuda_driver::import_fd(int fd, const allocation_request& request) {
  check_caller();
  check_multiple("the size to import", request.bytes, unit_);
  if (::fcntl(fd, F_GETFD) == -1) {
    throw invalid_argument(fmt::format("cannot import descriptor {}: it is not open", fd), {},
                           errno);
  }
  const outside_capture relaxed(api_);
  const auto current = context_scope::existing(contexts_);
  CUmemGenericAllocationHandle imported = 0;
  // This one argument is passed by value, in the pointer.
  void* const by_value = reinterpret_cast<void*>(static_cast<std::uintptr_t>(fd));
  check(api_, api_.mem_import(&imported, by_value, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
        [&] { return fmt::format("import {} from a descriptor", format_bytes(request.bytes)); });
  const auto handle = static_cast<allocation_handle>(imported);
  ledger_.add_handle(handle, request, true);
  return handle;
}

fabric_handle cuda_driver::export_fabric(allocation_handle handle) {
  check_caller();
  const auto what = ledger_.find(handle);
  if (!fabric_works()) {
    throw unsupported("this machine shares no memory over the fabric", k_fabric_help);
  }
  if (what->request.share != share_kind::fabric) {
    throw invalid_argument("cannot export a fabric handle of memory that was not created for it",
                           "create it with share_kind::fabric");
  }
  const outside_capture relaxed(api_);
  const auto current = context_scope::existing(contexts_);
  CUmemFabricHandle shared{};
  check(api_, api_.mem_export(&shared, native(handle), CU_MEM_HANDLE_TYPE_FABRIC, 0),
        [] { return "export a fabric handle"; });
  fabric_handle exported{};
  static_assert(sizeof exported == sizeof shared);
  std::memcpy(exported.data(), &shared, sizeof shared);
  return exported;
}

allocation_handle cuda_driver::import_fabric(const fabric_handle& shared,
                                             const allocation_request& request) {
  check_caller();
  check_multiple("the size to import", request.bytes, unit_);
  if (!fabric_works()) {
    throw unsupported("this machine shares no memory over the fabric", k_fabric_help);
  }
  const outside_capture relaxed(api_);
  const auto current = context_scope::existing(contexts_);
  CUmemFabricHandle wanted{};
  std::memcpy(&wanted, shared.data(), sizeof wanted);
  CUmemGenericAllocationHandle imported = 0;
  const CUresult result = api_.mem_import(&imported, &wanted, CU_MEM_HANDLE_TYPE_FABRIC);
  if (result != CUDA_SUCCESS) {
    throw_cuda_error(api_, result,
                     fmt::format("import {} from a fabric handle", format_bytes(request.bytes)),
                     k_fabric_help);
  }
  const auto handle = static_cast<allocation_handle>(imported);
  ledger_.add_handle(handle, request, true);
  return handle;
}

}  // namespace evmm
