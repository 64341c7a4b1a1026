// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl_transfers.hpp"

#include "comm/collective_change.hpp"
#include "lib/memory/copier.hpp"
#include "lib/memory/device_scope.hpp"
#include "lib/memory/scoped_stream.hpp"
#include "lib/support/log.hpp"

#include <evmm/error.hpp>

#include <algorithm>
#include <deque>
#include <list>
#include <utility>

// A communicator is a queue: a send or receive in it, once begun, holds up all behind it until its
// peer's is at the head of the peer's. So what may wait for what must not close a circle, whoever
// puts to whom. There are two queues, for bytes to higher ranks and for bytes to lower ones. In the
// upward one, say, a send waits for a higher rank; ahead of the receive that it meets there are
// sends of that rank at most, since a rank receives one block at a time and had it begun when the
// send was made. Those wait for higher ranks still: the chain ends. A receive waits for a lower
// rank's send, ahead of which are sends, whose chains end, and at most one receive, which waits for
// a rank lower still.

namespace evmm {

namespace {

class transfer_queue {
 public:
  using transfer = large_transfers::transfer;
  struct call {
    bool send = false;
    rank_id peer;
    address at = 0;
    std::size_t bytes = 0;
    transfer id{};
  };

  /// Collective.
  transfer_queue(const nccl_communicator::state& like, device_id device, native_stream stream)
      : on_(*like.on),
        device_(device),
        stream_(stream),
        nccl_(like.ranks, like.on, {.device = device}) {}
  transfer_queue(const transfer_queue&) = delete;
  transfer_queue& operator=(const transfer_queue&) = delete;

  /// Sends itself a word, so that the kernel is loaded while no stream waits for it.
  void warm_up() {
    const address words = on_.allocate_async(device_, 2 * sizeof(std::uint64_t), stream_);
    const auto self = nccl_.ranks().rank();
    nccl_communicator::state& nccl = *nccl_.shared();
    try {
      const device_scope current(on_, device_);
      const nccl_api& api = nccl.api;
      auto* const from = reinterpret_cast<std::byte*>(words);
      auto* const to = from + sizeof(std::uint64_t);
      nccl.collective_call("the first ncclSend and ncclRecv", [&] {
        api.group_start();
        api.send(from, sizeof(std::uint64_t), nccl_int8, self.value, nccl.comm, stream_);
        api.receive(to, sizeof(std::uint64_t), nccl_int8, self.value, nccl.comm, stream_);
        return api.group_end();
      });
      nccl.or_break([&] {
        nccl.wait_until("the first ncclSend and ncclRecv", [&] { return on_.idle(stream_); });
      });
    } catch (...) {
      log_failure("freeing words", [&] { on_.free_async(words, stream_); });
      throw;
    }
    on_.free_async(words, stream_);
  }
  void close() { nccl_.close(); }

  void add(const call& next, native_event after) {
    on_.wait(stream_, after);
    waiting_.push_back(next);
    advance();
  }
  /// What was not found here is in line, or of the other queue.
  bool done(transfer which) {
    advance();
    const auto found = std::find_if(begun_.begin(), begun_.end(),
                                    [&](const begun& each) { return each.id == which; });
    if (found == begun_.end() || !found->recorded || !on_.done(found->over.get())) return false;
    begun_.erase(found);
    return true;
  }
  void give_up() noexcept {
    if (!begun_.empty()) nccl_.shared()->break_off("the channel gave up what was under way");
  }

 private:
  struct begun {
    transfer id;
    scoped_event over;
    bool recorded = false;  ///< its kernel is on the stream
  };

  /// NCCL takes a call when its last one is launched, and connects two ranks at their first.
  void advance() {
    nccl_communicator::state& nccl = *nccl_.shared();
    nccl.check_usable();
    if (starting_) {
      int now = nccl_success;
      nccl.call(doing(), nccl.api.async_error(nccl.comm, &now));
      nccl.call(doing(), now);
      if (now == nccl_in_progress) return;
      on_.record(begun_.back().over.get(), stream_);
      begun_.back().recorded = true;
      starting_ = false;
    }
    if (waiting_.empty()) return;
    const call next = waiting_.front();
    waiting_.pop_front();
    begun_.push_back({next.id, scoped_event(on_, device_)});
    starting_ = true;
    sends_ = next.send;
    const device_scope current(on_, device_);
    auto* const at = reinterpret_cast<std::byte*>(next.at);
    nccl.call(doing(), next.send ? nccl.api.send(at, next.bytes, nccl_int8, next.peer.value,
                                                 nccl.comm, stream_)
                                 : nccl.api.receive(at, next.bytes, nccl_int8, next.peer.value,
                                                    nccl.comm, stream_));
  }
  const char* doing() const { return sends_ ? "ncclSend" : "ncclRecv"; }

  driver& on_;
  device_id device_;
  native_stream stream_;
  std::deque<call> waiting_;
  std::list<begun> begun_;
  bool starting_ = false;   ///< NCCL is at the last of `begun_`
  bool sends_ = false;      ///< and that is a send
  nccl_communicator nccl_;  ///< goes first
};

struct queue_streams {
  queue_streams(driver& on, device_id device) : upward(on, device), downward(on, device) {}
  scoped_stream upward;
  scoped_stream downward;
};

class nccl_transfers final : public large_transfers {
 public:
  /// Collective.
  nccl_transfers(const nccl_communicator::state& like, device_id device,
                 std::unique_ptr<const queue_streams> streams, std::size_t least, std::size_t most)
      : me_(like.ranks->rank()),
        least_(least),
        most_(most),
        streams_(std::move(streams)),
        upward_(like, device, streams_->upward.get()),
        downward_(like, device, streams_->downward.get()) {
    agree_on(*like.ranks, "nccl_transfers: the first kernel", [&] { upward_.warm_up(); });
  }

  std::string way() const override { return "NCCL send and receive"; }
  std::size_t least() const override { return least_; }
  std::size_t most() const override { return most_; }

  transfer send(rank_id to, address from, std::size_t bytes, native_event after) override {
    const transfer made = next();
    (to > me_ ? upward_ : downward_).add({true, to, from, bytes, made}, after);
    return made;
  }
  transfer receive(rank_id from, address into, std::size_t bytes, native_event after) override {
    const transfer made = next();
    (from < me_ ? upward_ : downward_).add({false, from, into, bytes, made}, after);
    return made;
  }
  bool done(transfer which) override { return upward_.done(which) || downward_.done(which); }
  void give_up() noexcept override {
    upward_.give_up();
    downward_.give_up();
  }
  void close() override {
    upward_.close();
    downward_.close();
  }

 private:
  transfer next() { return static_cast<transfer>(next_++); }

  rank_id me_;
  std::size_t least_;
  std::size_t most_;
  std::uint64_t next_ = 0;
  std::unique_ptr<const queue_streams> streams_;
  transfer_queue upward_;
  transfer_queue downward_;
};

}  // namespace

std::unique_ptr<large_transfers> make_nccl_transfers(const nccl_communicator::state& like,
                                                     device_id device, std::size_t least,
                                                     std::size_t most) {
  std::unique_ptr<const queue_streams> streams;
  agree_on(*like.ranks, "nccl_transfers: streams",
           [&] { streams = std::make_unique<const queue_streams>(*like.on, device); });
  return std::make_unique<nccl_transfers>(like, device, std::move(streams), least, most);
}

}  // namespace evmm
