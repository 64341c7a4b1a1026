// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/courier.hpp"
#include "comm/wire.hpp"
#include "comm/word_slots.hpp"

#include <evmm/driver.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <variant>
#include <vector>

namespace evmm {

/// The thread behind a symmetric_channel. It carries out what streams ask for of ranks of other
/// nodes, and what those ask for of this one; and it watches the waits of streams, to let them go
/// when nobody will end them.
///
/// Each call leaves three operations on the stream: it stores that it got there, waits, and stores
/// that it went on. Members may be called by one thread at a time, beside the engine's own.
class channel_engine {
 public:
  using milliseconds = std::chrono::milliseconds;

  /// Without a link it only watches. Keeps references to `on` and `own`.
  channel_engine(driver& on, std::shared_ptr<node_link> link,
                 std::shared_ptr<large_transfers> large, const own_parts& own,
                 const courier::settings& how);
  channel_engine(const channel_engine&) = delete;
  channel_engine& operator=(const channel_engine&) = delete;
  ~channel_engine();
  /// Stops where it stands. What streams still wait for is let go. Nothing else may be called
  /// afterwards, but mail().
  void stop() noexcept;

  /// How long peers may take from now on.
  void set_patience(milliseconds patience) { patience_ = patience; }

  struct operation;
  /// Starts to send once the stream gets here; the stream goes on with other work until end().
  operation& begin_put(std::vector<far_piece> pieces, native_stream stream);
  void end(operation& begun, native_stream stream);
  void get(far_get wanted, native_stream stream);
  /// Waits for a word that `from` will store; `what` is for the error if it does not.
  void wait(address word, std::uint64_t least, rank_id from, std::string what,
            native_stream stream);

  /// Throws what the engine failed with, if it did.
  void check() const;
  /// Makes it fail, when a call could only do a part of its work.
  void fail(const wire_error& why);
  /// Blocks until every call is carried out, or the engine has failed.
  void drain();

  /// Null without a link.
  const courier* mail() const { return mail_ ? &*mail_ : nullptr; }

 private:
  using clock = courier::clock;
  using operations = std::list<operation>;
  struct get_call {
    far_get wanted;
    bool asked = false;
  };
  struct awaited_word {
    address word = 0;
    std::uint64_t least = 0;
    rank_id from;
    std::string what;
  };
  using work = std::variant<courier::outgoing, get_call, awaited_word>;

  operation& begin(work what, native_stream stream);
  void finish(address word, std::uint64_t least, operation& begun, native_stream stream);
  void run();
  bool advance();
  bool advance(operation& each, clock::time_point now);
  bool retire();
  void let_go();
  void leave();
  bool failed() const { return failed_.load(std::memory_order_acquire); }

  driver& on_;
  std::atomic<milliseconds> patience_{milliseconds{30'000}};
  word_slots slots_;
  std::uint64_t ticket_ = 0;
  std::optional<courier> mail_;
  native_stream rescue_stream_ = nullptr;

  mutable std::mutex mutex_;
  std::condition_variable changed_;  ///< there is something new to do, or it is to stop
  std::condition_variable drained_;
  operations new_;
  bool idle_ = true;
  bool stop_ = false;
  std::optional<wire_error> failure_;
  std::atomic<bool> failed_ = false;

  // The thread's own.
  operations under_way_;
  bool gave_up_ = false;  ///< the courier has, after a failure
  std::thread thread_;
};

}  // namespace evmm
