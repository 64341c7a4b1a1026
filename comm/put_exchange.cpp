// SPDX-License-Identifier: Apache-2.0
#include "comm/put_exchange.hpp"

#include "lib/support/log.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <utility>

namespace evmm {

put_exchange::put_exchange(symmetric_region& region, std::unique_ptr<put_port> port,
                           std::unique_ptr<node_exchange> otherwise)
    : ranks_(region.ranks()),
      on_(region.on()),
      otherwise_(std::move(otherwise)),
      port_(std::move(port)),
      plan_(ranks_.size()),
      latest_(on_.create_event(region.device())) {
  follows_ =
      region.observe({.before_change = [this](const region_change&) { on_.synchronize(latest_); }});
}

put_exchange::~put_exchange() {
  follows_.reset();
  log_failure("destroying an event", [&] { on_.destroy_event(latest_); });
}

std::string put_exchange::way() const {
  const std::string why = port_->why_down();
  return why.empty() ? port_->name()
                     : fmt::format("{}; {} is down: {}", otherwise_->way(), port_->name(), why);
}

void put_exchange::exchange(std::span<const block> out, std::span<const block> in,
                            native_stream stream) {
  if (!port_->why_down().empty()) return otherwise_->exchange(out, in, stream);
  on_.wait(stream, latest_);
  port_->carry_out(plan_.next(out, in), ranks_.timeout(), stream);
  on_.record(latest_, stream);
}

void put_exchange::check() {
  if (const auto rank = port_->late()) {
    throw timed_out(
        fmt::format("rank {} did not come to an exchange by {} within {} s", rank->value,
                    port_->name(), static_cast<double>(ranks_.timeout().count()) / 1000),
        "see what became of that rank; EVMM_TIMEOUT_MS or set_timeout allows more time");
  }
  otherwise_->check();
}

void put_exchange::drain() {
  on_.synchronize(latest_);
  otherwise_->drain();
}

std::string agree_on_reason(bootstrap& ranks, const std::string& mine, std::string_view step) {
  const auto all = ranks.all_gather(std::as_bytes(std::span{mine}), step);
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].empty()) continue;
    return fmt::format(
        "rank {}: {}", r,
        std::string_view(reinterpret_cast<const char*>(all[r].data()), all[r].size()));
  }
  return {};
}

}  // namespace evmm
