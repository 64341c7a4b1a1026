// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/comm/nccl_communicator.hpp>
#include <evmm/comm/symmetric_region.hpp>

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

struct ncclWindow_vidmem;  // ncclWindow_t points to one

namespace [[gnu::visibility("default")]] evmm {

/// What part of a region is registered; equal on all ranks.
struct nccl_range {
  /// From the region's base: a buffer's offset, say. What is registered starts where the segment
  /// there does, since NCCL takes handles whole; pieces() tells.
  std::size_t offset = 0;
  /// Rounded up to a multiple of 4,096 from the base. 0: to the region's end, wherever that is.
  std::size_t bytes = 0;
  /// Leave out segments that any rank has in HOST_NUMA: for signals, multimem and NCCL's symmetric
  /// kernels, which host memory forgoes. Without it such a segment needs
  /// nccl_ability::host_segments.
  bool device_only = false;
  /// Kernels alone use it (LSA, GIN), and no collective, send or receive of NCCL's: from 2.30.3 on
  /// it is then one window over all segments. Collectives would go wrong there in silence: for
  /// their copies between ranks NCCL (2.30.3 to 2.30.7) maps those handles that the first one on
  /// the window touches, and takes the mapping for all of it.
  bool kernels_only = false;
  /// This rank's streams on which a graph may be captured meanwhile: NCCL cannot register then.
  std::span<const native_stream> streams = {};
};

/// Where an offset of the region lies in NCCL's eyes.
struct nccl_place {
  ncclWindow_vidmem* window = nullptr;  ///< an ncclWindow_t
  std::size_t offset = 0;               ///< in that window
  std::size_t bytes = 0;                ///< from there to the window's end
};

/// A hold that keeps a window as it is; dropped when the last copy goes.
using nccl_pin = std::shared_ptr<const void>;

/// A symmetric region, or part of it, as NCCL windows that follow the region: one for each segment,
/// which at() tells apart; with `kernels_only`, from NCCL 2.30.3 on, one over all.
///
/// Addresses: a change that replaces memory under the window takes it down first and registers it
///   again after; a window over all segments to the region's end is registered anew when the region
///   grows. Window handles and peers' addresses are other ones then: ask again when
///   the region's epoch has changed. Elsewhere windows stay as they are.
/// Units: bytes.
/// Threads: as the region's; pin() and its hold from any thread.
/// Streams: name the streams that use the window in the change's `uses`.
/// Errors: construction fails on all ranks or none. When a change holds and the window cannot be
///   registered again, the change stays, the window is down, and its use throws invalid_argument
///   with the reason, until a later change brings it up.
class nccl_window {
 public:
  /// Whether collectives will be called with the same offsets on all ranks, which is what NCCL's
  /// symmetric kernels ask (NCCL_WIN_COLL_SYMMETRIC).
  enum class offsets : std::uint8_t { any, symmetric };

  /// Collective. The region and the communicator are on the same bootstrap. Throws unsupported,
  /// with the version needed, for what the loaded NCCL cannot do, also where it would do it wrong
  /// in silence, and for what nccl_communicator::probe() found not to work; invalid_argument for a
  /// range that is not backed, for a bootstrap that differs, and during a capture.
  nccl_window(nccl_communicator& on, symmetric_region& region, const nccl_range& range = {},
              offsets used = offsets::any);
  nccl_window(nccl_window&&) noexcept;
  nccl_window& operator=(nccl_window&&) noexcept;
  /// Local: deregisters. Destroy it on all ranks before the region's next change, which refuses to
  /// go on with windows on some ranks only. NCCL work that uses it must be done.
  ~nccl_window();

  /// Where `offset` (from the region's base) lies, for kernels. Throws invalid_argument outside of
  /// the range, in a segment left out, and while the window is down; unsupported where NCCL keeps
  /// nothing on the device that kernels could follow: where it does not reach all ranks directly,
  /// and below 2.30 also for a communicator's only rank.
  nccl_place at(std::size_t offset) const;
  /// A peer's address for `offset`, for kernels: NCCL's own mapping of it. Throws unsupported below
  /// NCCL 2.29 or where NCCL reaches the rank by the network alone.
  std::byte* peer(rank_id rank, std::size_t offset) const;
  /// Registered pieces, ascending, as (offset from the region's base, bytes).
  std::vector<grown> pieces() const;
  /// Why it is down; empty while it is up.
  const std::string& why_down() const noexcept;
  /// Forbids changes that would take the window down as long as the hold lives: a captured graph
  /// has its handles in it. They throw invalid_argument on all ranks.
  [[nodiscard]] nccl_pin pin() const;

 private:
  struct state;
  std::unique_ptr<state> state_;
};

/// The DEVICE segments of a region's part as user buffers of NCCL (ncclCommRegister), for zero-copy
/// collectives without windows. Follows the region as a window does, with the same promises; the
/// registering itself is local. Host segments are left out.
class nccl_user_buffer {
 public:
  /// Collective, since it follows the region. Throws unsupported below NCCL 2.19 and where NCCL
  /// registers nothing (NCCL_LOCAL_REGISTER=0).
  nccl_user_buffer(nccl_communicator& on, symmetric_region& region, const nccl_range& range = {});
  nccl_user_buffer(nccl_user_buffer&&) noexcept;
  nccl_user_buffer& operator=(nccl_user_buffer&&) noexcept;
  /// As nccl_window's.
  ~nccl_user_buffer();

  std::vector<grown> pieces() const;
  const std::string& why_down() const noexcept;
  [[nodiscard]] nccl_pin pin() const;

 private:
  struct state;
  std::unique_ptr<state> state_;
};

}  // namespace evmm
