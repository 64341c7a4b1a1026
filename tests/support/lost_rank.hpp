// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/exchange_contract.hpp"
#include "tests/support/forwarding_driver.hpp"
#include "tests/support/thread_ranks.hpp"

#include <evmm/comm/handle_exchange.hpp>
#include <evmm/host_driver.hpp>

#include <chrono>
#include <csignal>
#include <memory>
#include <string>
#include <utility>

// A rank that is killed in the middle of an exchange, and what the others must make of it.

namespace evmm::test {

/// Where the rank is killed: before its peers have anything of it, or after they have it all.
enum class death { at_its_export, at_its_import };

/// Kills its process, as the kernel does when memory runs out, at one call.
class deadly_driver final : public forwarding_driver {
 public:
  /// `exports` before the exchange in which it dies.
  deadly_driver(std::shared_ptr<driver> inner, death when, int exports = 0)
      : forwarding_driver(std::move(inner)), when_(when), exports_(exports) {}
  unique_fd export_fd(allocation_handle handle) override {
    if (when_ == death::at_its_export && exports_ == 0) std::raise(SIGKILL);
    --exports_;
    return forwarding_driver::export_fd(handle);
  }
  allocation_handle import_fd(int fd, const allocation_request& request) override {
    if (when_ == death::at_its_import && exports_ < 0) std::raise(SIGKILL);
    return forwarding_driver::import_fd(fd, request);
  }

 private:
  death when_;
  int exports_;
};

/// One rank of a job in which `victim` dies. Returns what is wrong with how the rank saw it, empty
/// when all is as it must be; does not return on the victim.
inline std::string see_a_rank_die(const std::shared_ptr<bootstrap>& ranks, rank_id victim,
                                  death when) {
  constexpr std::chrono::milliseconds timeout{2000};
  std::shared_ptr<driver> on = host_driver::make({});
  if (ranks->rank() == victim) on = std::make_shared<deadly_driver>(on, when);
  handle_exchange exchange(ranks, on);
  const auto mine = some_memory(*on, 2, share_kind::fd);
  ranks->set_timeout(timeout);
  const auto since = std::chrono::steady_clock::now();
  std::exception_ptr failure;
  try {
    exchange.exchange(pointers(mine));
  } catch (...) {
    failure = std::current_exception();
  }
  const auto exchanged = what(failure);
  const auto agreed = thrown_by([&] { ranks->agree(failure); });
  const auto again = thrown_by([&] { ranks->barrier(); });
  const auto took = std::chrono::steady_clock::now() - since;

  const auto name = "rank " + std::to_string(victim.value);
  // A rank that had all from the victim before it died learns of it when they agree.
  if (when == death::at_its_export && exchanged.rfind("peer_error: " + name + " closed", 0) != 0) {
    return "the exchange did not name " + name + ": '" + exchanged + "'";
  }
  if (agreed.find(name + " did not arrive in agree") == std::string::npos) {
    return "agree did not name " + name + ": '" + agreed + "'";
  }
  if (again.rfind("peer_error: barrier cannot start", 0) != 0) {
    return "the bootstrap was not broken: '" + again + "'";
  }
  if (took > timeout + std::chrono::seconds(5)) return "it took too long";
  return {};
}

}  // namespace evmm::test
