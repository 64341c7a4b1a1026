// SPDX-License-Identifier: Apache-2.0
#include "comm/channel_engine.hpp"

#include "lib/support/log.hpp"
#include "lib/support/patience.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <utility>

namespace evmm {

/// A call that a stream has not passed yet.
struct channel_engine::operation {
  word_slot* slot = nullptr;
  std::uint64_t ticket = 0;
  work what;
  bool reached = false;
  clock::time_point since = {};  ///< when the stream got here; later, when it was last let go

  bool got_here() const { return load_word(slot->reached) >= ticket; }
  bool passed() const { return load_word(slot->passed) >= ticket; }
  void release() { store_word(slot->released, ticket); }
};

channel_engine::channel_engine(driver& on, std::shared_ptr<node_link> link,
                               std::shared_ptr<large_transfers> large, const own_parts& own,
                               const courier::settings& how)
    : on_(on), slots_(on) {
  if (link != nullptr) mail_.emplace(on, std::move(link), std::move(large), own, how);
  rescue_stream_ = on.create_stream(how.device);
  try {
    thread_ = std::thread([this] { run(); });
  } catch (...) {
    on.destroy_stream(rescue_stream_);
    throw;
  }
}

void channel_engine::stop() noexcept {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    changed_.notify_one();
  }
  thread_.join();
}

channel_engine::~channel_engine() {
  stop();
  // Its stores go to memory that may be unmapped next.
  log_failure("waiting for a channel's stream", [&] { on_.synchronize(rescue_stream_); });
  log_failure("destroying a channel's stream", [&] { on_.destroy_stream(rescue_stream_); });
}

// --- on the caller's thread ---------------------------------------------------------------------

channel_engine::operation& channel_engine::begin(work what, native_stream stream) {
  operations one;
  operation& made = one.emplace_back(operation{.what = std::move(what)});
  made.slot = &slots_.take();
  made.ticket = ++ticket_;
  try {
    on_.store_word(address_of(made.slot->reached), made.ticket, stream);
  } catch (...) {
    slots_.give(*made.slot);
    throw;
  }
  const std::lock_guard lock(mutex_);
  new_.splice(new_.end(), one);
  idle_ = false;
  changed_.notify_one();
  return made;
}

void channel_engine::finish(address word, std::uint64_t least, operation& begun,
                            native_stream stream) {
  try {
    on_.wait_word(word, least, stream);
    on_.store_word(address_of(begun.slot->passed), begun.ticket, stream);
  } catch (...) {
    fail(describe_error(std::current_exception()));
    throw;
  }
}

channel_engine::operation& channel_engine::begin_put(std::vector<far_piece> pieces,
                                                     native_stream stream) {
  return begin(courier::outgoing(std::move(pieces)), stream);
}

void channel_engine::end(operation& begun, native_stream stream) {
  finish(address_of(begun.slot->released), begun.ticket, begun, stream);
}

void channel_engine::get(far_get wanted, native_stream stream) {
  end(begin(get_call{wanted}, stream), stream);
}

void channel_engine::wait(address word, std::uint64_t least, rank_id from, std::string what,
                          native_stream stream) {
  finish(word, least, begin(awaited_word{word, least, from, std::move(what)}, stream), stream);
}

void channel_engine::check() const {
  if (!failed()) return;
  const std::lock_guard lock(mutex_);
  throw_error(failure_->category, failure_->info);
}

void channel_engine::fail(const wire_error& why) {
  const std::lock_guard lock(mutex_);
  if (failure_) return;
  failure_ = why;
  failed_.store(true, std::memory_order_release);
  log().error("a symmetric channel is broken: {}", why.info.message);
  changed_.notify_one();
  drained_.notify_all();
}

void channel_engine::drain() {
  std::unique_lock lock(mutex_);
  drained_.wait(lock, [&] { return idle_ || failure_; });
}

// --- on the engine's own ------------------------------------------------------------------------

void channel_engine::run() {
  patience rest;
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      under_way_.splice(under_way_.end(), new_);
      const bool nothing_to_do = under_way_.empty() && (!mail_ || gave_up_);
      idle_ = under_way_.empty() && (nothing_to_do || mail_->idle());
      if (idle_) drained_.notify_all();
      if (stop_) break;
      if (nothing_to_do) {
        changed_.wait(lock, [&] { return stop_ || !new_.empty(); });
        rest.renew();
        continue;
      }
    }
    bool moved = false;
    if (!failed()) {
      try {
        moved = advance();
      } catch (...) {
        fail(describe_error(std::current_exception()));
      }
    }
    if (failed()) {
      if (mail_ && !std::exchange(gave_up_, true)) mail_->give_up();
      let_go();
    }
    if (retire() || moved) {
      rest.renew();
    } else {
      rest.spend();
    }
  }
  leave();
}

bool channel_engine::advance() {
  const auto now = clock::now();
  bool moved = false;
  for (operation& each : under_way_) moved = advance(each, now) || moved;
  if (!mail_) return moved;
  mail_->keep_time(now, patience_);
  return mail_->advance() || moved;
}

bool channel_engine::advance(operation& each, clock::time_point now) {
  if (!each.reached) {
    if (!each.got_here()) return false;
    each.reached = true;
    each.since = now;
  }
  const milliseconds patience = patience_;
  const double seconds = std::chrono::duration<double>(patience).count();
  const char* const help =
      "see what became of that rank; EVMM_TIMEOUT_MS or set_timeout allows more time";
  if (auto* const put = std::get_if<courier::outgoing>(&each.what)) {
    const bool moved = put->left > 0 && mail_->send(*put);
    if (put->left == 0) each.release();
    return moved;
  }
  if (auto* const get = std::get_if<get_call>(&each.what)) {
    far_get& wanted = get->wanted;
    if (!std::exchange(get->asked, true)) {
      mail_->ask(wanted);
      return true;
    }
    if (wanted.received == wanted.bytes) {
      each.release();
    } else if (!wanted.large && now - wanted.since >= patience) {
      throw timed_out(fmt::format("rank {} did not answer a get of {} bytes within {:.1f} s",
                                  wanted.from.value, wanted.bytes, seconds),
                      help);
    }
    return false;
  }
  const auto& wait = std::get<awaited_word>(each.what);
  if (now - each.since >= patience && !each.passed()) {
    throw timed_out(fmt::format("rank {} did not signal {} within {:.1f} s", wait.from.value,
                                wait.what, seconds),
                    help);
  }
  return false;
}

/// Streams that wait are let go, and at their next waits again: what those are for may be unmapped
/// next. One that is held up by other work is not waited for longer.
void channel_engine::leave() {
  constexpr milliseconds most{2000};
  patience rest;
  const auto begun = clock::now();
  while (!under_way_.empty() && clock::now() - begun < most) {
    let_go();
    retire();
    rest.spend();
  }
}

bool channel_engine::retire() {
  const auto before = under_way_.size();
  for (auto each = under_way_.begin(); each != under_way_.end();) {
    if (!each->passed()) {
      ++each;
      continue;
    }
    slots_.give(*each->slot);
    each = under_way_.erase(each);
  }
  return under_way_.size() < before;
}

/// Again and again, since a peer that is still there may store a lower value meanwhile.
void channel_engine::let_go() {
  constexpr milliseconds pause{1};
  const auto now = clock::now();
  for (operation& each : under_way_) {
    each.release();
    const auto* const wait = std::get_if<awaited_word>(&each.what);
    // A word that has let its stream pass may be higher by now.
    if (wait == nullptr || !each.got_here() || each.passed() || now - each.since < pause) continue;
    each.since = now;
    log_failure("letting a stream go",
                [&] { on_.store_word(wait->word, wait->least, rescue_stream_); });
  }
}

}  // namespace evmm
