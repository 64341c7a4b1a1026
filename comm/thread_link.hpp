// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/wire.hpp"

#include <evmm/comm/node_link.hpp>

#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace evmm {

/// The mailboxes of ranks that are threads of one process. Thread-safe.
class post_office {
 public:
  struct letter {
    rank_id from;
    byte_vector bytes;
  };
  explicit post_office(std::size_t ranks) : boxes_(ranks) {}

  void post(rank_id to, letter message);
  std::optional<letter> collect(rank_id rank);

 private:
  struct box {
    std::mutex mutex;
    std::deque<letter> letters;
  };
  std::vector<box> boxes_;
};

/// A link between such ranks. Transfers are over when they begin.
class thread_link : public node_link {
 public:
  thread_link(rank_id rank, std::shared_ptr<post_office> office)
      : rank_(rank), office_(std::move(office)) {}

  std::string name() const override { return "threads"; }
  transfer send(rank_id to, std::span<const std::byte> message) override;
  std::optional<arrival> probe() override;
  transfer receive(std::span<std::byte> into) override;
  bool done(transfer) override { return true; }

 private:
  rank_id rank_;
  std::shared_ptr<post_office> office_;
  std::optional<post_office::letter> probed_;
};

}  // namespace evmm
