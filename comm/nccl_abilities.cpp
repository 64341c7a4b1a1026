// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl_gin.hpp"
#include "comm/nccl_state.hpp"
#include "lib/support/environment.hpp"
#include "lib/support/nccl_version.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

// What each version of NCCL can do, as read from its sources and, where FACTS say so, run.

namespace evmm {

const char* to_string(nccl_ability ability) noexcept {
  switch (ability) {
    case nccl_ability::user_buffers:
      return "user buffers";
    case nccl_ability::windows:
      return "windows";
    case nccl_ability::several_segments:
      return "windows over several segments";
    case nccl_ability::host_segments:
      return "windows with HOST_NUMA segments";
    case nccl_ability::host_segments_over_network:
      return "windows with HOST_NUMA segments over the network";
    case nccl_ability::peer_pointers:
      return "peers' addresses from the host";
    case nccl_ability::gin:
      return "GIN for windows over both tiers";
  }
  return "ability";
}

int nccl_version_with(nccl_ability ability) noexcept {
  switch (ability) {
    case nccl_ability::user_buffers:
      return 21900;
    case nccl_ability::windows:
      return 22700;
    case nccl_ability::several_segments:
    case nccl_ability::host_segments:
      return 23003;
    case nccl_ability::host_segments_over_network:
      return 23004;
    case nccl_ability::peer_pointers:
      return 22900;
    case nccl_ability::gin:
      return 23004;
  }
  return 0;
}

std::string nccl_communicator::state::why_not(nccl_ability ability) const {
  std::string why = why_not_claimed(ability);
  if (!why.empty()) return why;
  for (const nccl_finding& each : probed) {
    if (each.ability == ability) return each.why_not;
  }
  return {};
}

std::string nccl_communicator::state::why_not_claimed(nccl_ability ability) const {
  const int needed = nccl_version_with(ability);
  if (version < needed) {
    return fmt::format("NCCL {} ({}) has no {}; {} has", nccl_version_text(version), library,
                       to_string(ability), nccl_version_text(needed));
  }
  const auto lacks = [&](const char* symbol) {
    return fmt::format("the NCCL {} in {} has no {}", nccl_version_text(version), library, symbol);
  };
  switch (ability) {
    case nccl_ability::user_buffers:
      if (api.buffer_register == nullptr || api.buffer_deregister == nullptr) {
        return lacks("ncclCommRegister");
      }
      break;
    case nccl_ability::peer_pointers:
      if (api.peer_pointer == nullptr) return lacks("ncclGetPeerDevicePointer");
      break;
    case nccl_ability::gin:
      if (api.query_properties == nullptr) return lacks("ncclCommQueryProperties");
      if (api.device_comm_create == nullptr || api.device_comm_destroy == nullptr) {
        return lacks("ncclDevCommCreate");
      }
      return why_not_gin_kernels(gin_kernels_version(), version);
    case nccl_ability::host_segments:
    case nccl_ability::host_segments_over_network:
      if (const auto off = environment("NCCL_ELASTIC_BUFFER_REGISTER"); off == "0") {
        return "NCCL_ELASTIC_BUFFER_REGISTER=0 forbids HOST_NUMA segments in windows";
      }
      [[fallthrough]];
    case nccl_ability::several_segments:
    case nccl_ability::windows:
      if (api.window_register == nullptr || api.window_deregister == nullptr) {
        return lacks("ncclCommWindowRegister");
      }
      break;
  }
  return {};
}

void nccl_communicator::state::require(nccl_ability ability, std::string_view wanted) const {
  const std::string why = why_not(ability);
  if (why.empty()) return;
  const int needed = nccl_version_with(ability);
  std::string help =
      "unset the variable before the process's first communicator, or use another "
      "build";
  if (version < needed) {
    help = fmt::format("use NCCL {} or later; EVMM_NCCL_LIBRARY or LD_LIBRARY_PATH picks another",
                       nccl_version_text(needed));
  } else if (why_not_claimed(ability).empty()) {
    help = "NCCL_DEBUG=WARN makes NCCL say more; a new probe() finds out whether it is mended";
  }
  throw unsupported(fmt::format("{}: {}", wanted, why), help);
}

}  // namespace evmm
