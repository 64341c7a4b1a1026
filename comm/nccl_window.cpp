// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl_follower.hpp"
#include "lib/support/nccl_version.hpp"

#include <evmm/comm/nccl_window.hpp>
#include <evmm/error.hpp>

#include <fmt/format.h>

namespace evmm {

struct nccl_window::state : nccl_follower {
  using nccl_follower::nccl_follower;
};
struct nccl_user_buffer::state : nccl_follower {
  using nccl_follower::nccl_follower;
};

nccl_window::nccl_window(nccl_communicator& on, symmetric_region& region, const nccl_range& range,
                         offsets used)
    : state_(std::make_unique<state>(
          on.shared(), region, range,
          used == offsets::symmetric ? nccl_kind::symmetric_window : nccl_kind::window)) {}
nccl_window::nccl_window(nccl_window&&) noexcept = default;
nccl_window& nccl_window::operator=(nccl_window&&) noexcept = default;
nccl_window::~nccl_window() = default;

nccl_place nccl_window::at(std::size_t offset) const {
  const nccl_follower::piece& found = state_->at(offset);
  const nccl_communicator::state& on = state_->on();
  if (!on.on->kernels_reach(reinterpret_cast<address>(found.handle))) {
    throw unsupported(
        fmt::format(
            "what NCCL {} returned for this window serves its collectives alone, and kernels "
            "that follow it would fault: it has no mappings of all ranks' memory",
            nccl_version_text(on.version)),
        "kernels follow windows where NCCL reaches all ranks directly (below 2.30 several ranks of "
        "one node); symmetric_view leads to the ranks of a node everywhere");
  }
  const std::size_t within = offset - found.span.offset;
  return {static_cast<ncclWindow_vidmem*>(found.handle), within, found.span.bytes - within};
}

std::byte* nccl_window::peer(rank_id rank, std::size_t offset) const {
  const nccl_place place = at(offset);
  const nccl_communicator::state& on = state_->on();
  on.require(nccl_ability::peer_pointers, "nccl_window::peer");
  void* found = nullptr;
  on.call("ncclGetPeerDevicePointer",
          on.api.peer_pointer(place.window, place.offset, rank.value, &found));
  if (found == nullptr) {
    throw unsupported(fmt::format("NCCL reaches rank {} by the network alone: no pointer leads to "
                                  "its memory",
                                  rank.value),
                      "use NCCL's collectives or its network calls (GIN)");
  }
  return static_cast<std::byte*>(found);
}

std::vector<grown> nccl_window::pieces() const {
  return state_->spans();
}
const std::string& nccl_window::why_down() const noexcept {
  return state_->why_down();
}
nccl_pin nccl_window::pin() const {
  return state_->pin();
}

nccl_user_buffer::nccl_user_buffer(nccl_communicator& on, symmetric_region& region,
                                   const nccl_range& range)
    : state_(std::make_unique<state>(on.shared(), region, range, nccl_kind::user_buffer)) {}
nccl_user_buffer::nccl_user_buffer(nccl_user_buffer&&) noexcept = default;
nccl_user_buffer& nccl_user_buffer::operator=(nccl_user_buffer&&) noexcept = default;
nccl_user_buffer::~nccl_user_buffer() = default;

std::vector<grown> nccl_user_buffer::pieces() const {
  return state_->spans();
}
const std::string& nccl_user_buffer::why_down() const noexcept {
  return state_->why_down();
}
nccl_pin nccl_user_buffer::pin() const {
  return state_->pin();
}

}  // namespace evmm
