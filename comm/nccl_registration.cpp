// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl_state.hpp"
#include "lib/support/format.hpp"
#include "lib/support/log.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>

// The calls that register memory with NCCL, and what they do in silence made errors.

namespace evmm {

ncclWindow_vidmem* nccl_communicator::state::register_window(address base, std::size_t bytes,
                                                             std::size_t taken, int flags) {
  const std::string doing =
      fmt::format("ncclCommWindowRegister of {} at {}", format_bytes(bytes), format_address(base));
  // NCCL may still write here after this rank gave up waiting: kept as long as the communicator.
  ncclWindow_vidmem*& slot = slots.emplace_back(nullptr);
  collective_call(doing, [&] {
    return api.window_register(comm, reinterpret_cast<void*>(base), bytes, &slot, flags);
  });
  ncclWindow_vidmem* const window = slot;
  slots.pop_back();
  if (window == nullptr) {
    throw unsupported(
        doing +
            ": NCCL registered nothing and said nothing, as it does where ranks cannot reach "
            "each other's memory",
        "NCCL needs peer access within a node, GPUDirect RDMA (GIN) between nodes, and no "
        "NCCL_CUMEM_ENABLE=0 or NCCL_WIN_ENABLE=0");
  }
  taken_bytes += taken;
  ++registered;
  return window;
}

void nccl_communicator::state::deregister_window(ncclWindow_vidmem* window, std::size_t taken) {
  taken_bytes -= taken;
  --registered;
  if (!can_deregister("ncclCommWindowDeregister")) return;
  or_break([&] { call("ncclCommWindowDeregister", api.window_deregister(comm, window)); });
}

void* nccl_communicator::state::register_buffer(address base, std::size_t bytes) {
  const std::string doing =
      fmt::format("ncclCommRegister of {} at {}", format_bytes(bytes), format_address(base));
  const device_scope current(*on, device);
  void* handle = nullptr;
  call(doing, api.buffer_register(comm, reinterpret_cast<void*>(base), bytes, &handle));
  if (handle == nullptr) {
    throw unsupported(doing + ": NCCL registered nothing and said nothing",
                      "unset NCCL_LOCAL_REGISTER=0 and NCCL_P2P_USE_CUDA_MEMCPY=1");
  }
  ++registered;
  return handle;
}

void nccl_communicator::state::deregister_buffer(void* handle) {
  --registered;
  if (!can_deregister("ncclCommDeregister")) return;
  const device_scope current(*on, device);
  call("ncclCommDeregister", api.buffer_deregister(comm, handle));
}

bool nccl_communicator::state::can_deregister(const char* doing) const noexcept {
  if (broken_by.empty()) return true;
  if (!ours) {
    log().warn("{} is left to the end of a broken communicator, whose owner must abort it", doing);
  }
  return false;
}

void nccl_communicator::state::share_breakage(const char* failure) {
  if (ranks->broken()) return break_off(failure);
  log_failure("telling ranks of a broken communicator", [&] {
    const auto broken =
        ranks->all_gather_value(std::uint8_t{!broken_by.empty()}, "nccl_communicator: broken?");
    if (std::none_of(broken.begin(), broken.end(), [](auto one) { return one != 0; })) return;
    break_off(failure);
    broken_by = failure;  // the same words on all ranks
  });
}

}  // namespace evmm
