// SPDX-License-Identifier: Apache-2.0
#include "comm/collective_change.hpp"
#include "comm/nccl_gin.hpp"
#include "comm/nccl_state.hpp"
#include "comm/nccl_transfers.hpp"
#include "lib/support/log.hpp"

#include <evmm/comm/nccl_link.hpp>
#include <evmm/error.hpp>

#include <utility>

namespace evmm {

namespace {

/// By ncclSend and ncclRecv.
class send_receive final : public node_exchange {
 public:
  send_receive(std::shared_ptr<nccl_communicator::state> over, symmetric_region& region)
      : over_(std::move(over)), region_(region) {}

  /// What way() says beside.
  void explain(std::string why_no_gin) { why_no_gin_ = std::move(why_no_gin); }

  std::string way() const override {
    const std::string name = "NCCL send and receive";
    return why_no_gin_.empty() ? name : name + " (no GIN: " + why_no_gin_ + ")";
  }
  void exchange(std::span<const block> out, std::span<const block> in,
                native_stream stream) override {
    over_->check_usable();
    const nccl_api& api = over_->api;
    const device_scope current(*over_->on, over_->device);
    // One group, so that sends and receives of all peers go side by side.
    over_->collective_call("ncclSend and ncclRecv", [&] {
      int failed = api.group_start();
      const auto note = [&](int result) {
        if (failed == nccl_success && result != nccl_in_progress) failed = result;
      };
      for (const block& part : in) {
        note(api.receive(region_.local() + part.at, part.bytes, nccl_int8, part.peer.value,
                         over_->comm, stream));
      }
      for (const block& part : out) {
        note(api.send(region_.local() + part.at, part.bytes, nccl_int8, part.peer.value,
                      over_->comm, stream));
      }
      const int ended = api.group_end();
      return failed == nccl_success ? ended : failed;
    });
  }

 private:
  std::shared_ptr<nccl_communicator::state> over_;
  symmetric_region& region_;
  std::string why_no_gin_;
};

class nccl_link final : public node_link {
 public:
  nccl_link(std::shared_ptr<nccl_communicator::state> over, std::shared_ptr<node_link> messages,
            const nccl_link_options& options)
      : over_(std::move(over)),
        messages_(std::move(messages)),
        holds_(messages_),
        options_(options) {}
  ~nccl_link() override {
    if (left_behind()) holds_.leave_behind();
  }

  std::string name() const override { return "nccl and " + messages_->name(); }
  transfer send(rank_id to, std::span<const std::byte> message) override {
    return messages_->send(to, message);
  }
  std::optional<arrival> probe() override { return messages_->probe(); }
  transfer receive(std::span<std::byte> into) override { return messages_->receive(into); }
  bool done(transfer which) override { return messages_->done(which); }

  std::unique_ptr<node_exchange> make_exchange(symmetric_region& region) override {
    auto plain = std::make_unique<send_receive>(over_, region);
    // What is sure to fail is found before anything of it begins, so that no rank begins alone.
    std::string why = agree_on_reason(*over_->ranks, why_no_gin(), "nccl_link: GIN?");
    std::unique_ptr<put_port> port;
    if (why.empty()) {
      try {
        port = make_gin_port(*over_, region);
      } catch (const std::exception& failure) {  // the same on all ranks
        if (over_->ranks->broken()) throw;
        why = failure.what();
      }
    }
    if (port != nullptr) {
      std::unique_ptr<node_exchange> made;
      agree_on(*over_->ranks, "nccl_link: exchange by puts", [&] {
        made = std::make_unique<put_exchange>(region, std::move(port), std::move(plain));
      });
      return made;
    }
    plain->explain(std::move(why));
    log().info("rank {}: exchanges between nodes go by {}", over_->ranks->rank().value,
               plain->way());
    return plain;
  }

  std::unique_ptr<large_transfers> make_large_transfers(device_id device) override {
    const std::string why =
        agree_on_reason(*over_->ranks, options_.large == 0 ? "nccl_link_options::large is 0" : "",
                        "nccl_link: large puts and gets?");
    if (!why.empty()) return nullptr;
    return make_nccl_transfers(*over_, device, options_.large, options_.large_piece);
  }

 private:
  /// What this rank knows by itself.
  std::string why_no_gin() const {
    if (!options_.gin) return "nccl_link_options::gin is off";
    try {
      over_->check_usable();
      return why_not_gin(*over_);
    } catch (const std::exception& failure) {
      return failure.what();
    }
  }

  std::shared_ptr<nccl_communicator::state> over_;
  std::shared_ptr<node_link> messages_;
  link_hold holds_;
  nccl_link_options options_;
};

}  // namespace

std::shared_ptr<node_link> make_nccl_link(const nccl_communicator& over,
                                          std::shared_ptr<node_link> messages,
                                          const nccl_link_options& options) {
  if (messages == nullptr) {
    throw invalid_argument("an NCCL link needs another one for its messages",
                           "bootstrap::make_link() gives the bootstrap's own");
  }
  if (options.large > 0 && options.large_piece == 0) {
    throw invalid_argument("nccl_link_options::large_piece is 0; it takes 1 or more",
                           "nccl_link_options::large = 0 leaves large puts and gets to messages");
  }
  return std::make_shared<nccl_link>(over.shared(), std::move(messages), options);
}

}  // namespace evmm
