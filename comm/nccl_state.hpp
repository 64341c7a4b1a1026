// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/nccl_library.hpp"
#include "lib/memory/device_scope.hpp"

#include <evmm/comm/nccl_communicator.hpp>

#include <chrono>
#include <cstddef>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace evmm {

/// What windows share with the communicator they are on, and keep alive.
struct nccl_communicator::state {
  state(std::shared_ptr<bootstrap> ranks_given, std::shared_ptr<driver> driver_given);
  state(const state&) = delete;
  state& operator=(const state&) = delete;
  /// Aborts one that is ours.
  ~state();

  void create(const nccl_options& options);
  void adopt(ncclComm* theirs);
  void close();
  /// Throws invalid_argument after close(), peer_error when it is broken.
  void check_usable() const;
  /// Throws invalid_argument while anything is registered on it.
  void check_bare() const;
  std::string why_not(nccl_ability ability) const;
  /// Why the loaded NCCL does not even claim to have it, by its version, symbols and environment.
  std::string why_not_claimed(nccl_ability ability) const;
  /// Throws unsupported, with the version needed, when it lacks the ability for `wanted`.
  void require(nccl_ability ability, std::string_view wanted) const;

  /// One call of NCCL, waited for by half the bootstrap's timeout. Throws what it failed with.
  void call(std::string_view doing, int result) const;
  void settle(std::string_view doing) const;
  /// Polls, by the same deadline.
  void wait_until(std::string_view doing, const std::function<bool()>& done) const;
  /// What the communicator does not survive when it fails: that breaks it.
  template <class Step>
  void or_break(Step&& step) {
    try {
      step();
    } catch (const std::exception& failure) {
      break_off(failure.what());
      throw;
    }
  }
  template <class Call>
  void collective_call(std::string_view doing, Call&& make) {
    or_break([&] {
      call(doing, make());
      settle(doing);
    });
  }
  /// Sums float32 over all ranks in place, and waits until the stream is past it. Collective.
  void all_reduce(std::string_view doing, address at, std::size_t count, native_stream stream);
  /// From now on every use throws. One that is ours is aborted, with all that is registered.
  void break_off(const char* why);
  void abort() noexcept;
  /// After all ranks threw `failure`: breaks it on all when it is broken on one, or the ranks lost
  /// each other. Collective.
  void share_breakage(const char* failure);
  /// The first collective, before which NCCL shall register nothing. Collective; later calls do
  /// nothing.
  void warm_up();
  /// As nccl_communicator's.
  std::vector<nccl_finding> probe();

  /// Registers [base, base + bytes), which takes `taken` of the addresses for windows. Collective.
  ncclWindow_vidmem* register_window(address base, std::size_t bytes, std::size_t taken, int flags);
  /// Local. A failure breaks the communicator: NCCL then keeps what lies behind the window.
  void deregister_window(ncclWindow_vidmem* window, std::size_t taken);
  /// Whether what is registered is still there to be deregistered. With a communicator of ours that
  /// broke it went; with another's it stays, since a call of NCCL may be under way.
  bool can_deregister(const char* doing) const noexcept;
  void* register_buffer(address base, std::size_t bytes);
  void deregister_buffer(void* handle);

  std::shared_ptr<bootstrap> ranks;
  std::shared_ptr<driver> on;
  const nccl_api& api;
  std::string library;
  int version = 0;
  ncclComm* comm = nullptr;
  bool ours = false;
  bool closed = false;
  bool warm = false;
  device_id device{0};
  std::string broken_by = {};
  std::size_t window_bytes = 0;
  std::size_t taken_bytes = 0;
  std::size_t registered = 0;             ///< windows, buffers and device communicators
  std::vector<nccl_finding> probed = {};  ///< by the latest probe()
  /// Where NCCL writes windows, perhaps later than a step was given up.
  std::list<ncclWindow_vidmem*> slots;
  /// What else it writes to.
  std::list<std::shared_ptr<void>> kept;

 private:
  class stride_setting;
  void find_window_bytes(std::size_t wanted, stride_setting& stride);
};

}  // namespace evmm
