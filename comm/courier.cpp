// SPDX-License-Identifier: Apache-2.0
#include "comm/courier.hpp"

#include "lib/support/format.hpp"
#include "lib/support/log.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

namespace evmm {

namespace {
constexpr std::size_t k_head = sizeof(message_head);

peer_error unknown(const message_head& head, rank_id from) {
  return peer_error(
      fmt::format("rank {} sent a message of unknown kind {}", from.value, head.what));
}
}  // namespace

courier::courier(driver& on, std::shared_ptr<node_link> link,
                 std::shared_ptr<large_transfers> large, const own_parts& own, const settings& how)
    : on_(on),
      link_(std::move(link)),
      own_(own),
      chunk_bytes_(how.chunk_bytes),
      out_(on, how.device, k_head + how.chunk_bytes, how.chunks),
      in_(on, how.device, k_head + how.chunk_bytes, how.chunks),
      put_before_(on, how.device) {
  if (large == nullptr) return;
  large_.emplace(on, how.device, std::move(large), own, in_.stream(),
                 [this](rank_id to, const message_head& head) { stage(to, head, 0, nullptr); });
}

void courier::give_up() noexcept {
  if (large_) large_->give_up();
}

courier::~courier() {
  // What was not handed to the link, or is over with it, needs its memory no more.
  const auto over = [&](std::optional<node_link::transfer> which) {
    bool done = !which;
    if (which) log_failure("asking for a message's end", [&] { done = link_->done(*which); });
    return done;
  };
  for (const parcel& waiting : staged_) {
    if (waiting.chunk) out_.give(*waiting.chunk);
  }
  for (const parcel& sent : sending_) {
    if (sent.chunk && over(sent.transfer)) out_.give(*sent.chunk);
  }
  for (const delivery& message : receiving_) {
    if (message.chunk && (message.complete || over(message.transfer))) in_.give(*message.chunk);
  }
  for (const applied& copying : applied_) in_.give(copying.chunk);
}

// --- out ----------------------------------------------------------------------------------------

bool courier::stage(rank_id to, message_head head, address from, std::size_t* left) {
  parcel next{.to = to, .left = left};
  const bool bytes = from != 0 && head.bytes > 0;
  if (bytes) {
    next.chunk = out_.take();
    if (!next.chunk) return false;
    next.size = k_head + head.bytes;
    std::memcpy(next.chunk->at, &head, k_head);
  } else {
    next.alone = wire_writer().put(head).take();
  }
  staged_.push_back(std::move(next));
  if (left != nullptr) ++*left;
  if (bytes) {
    const staging_chunk& chunk = *staged_.back().chunk;
    on_.copy(reinterpret_cast<address>(chunk.at + k_head), from, head.bytes, out_.stream());
    on_.record(chunk.copied, out_.stream());
  }
  return true;
}

bool courier::send(outgoing& put) {
  bool moved = false;
  for (; put.piece < put.pieces.size(); ++put.piece, put.staged = 0, --put.left) {
    const far_piece& piece = put.pieces[put.piece];
    if (piece.large) {
      large_->put(piece, put.left);
      moved = true;
      continue;
    }
    do {
      const std::size_t bytes = std::min(chunk_bytes_, piece.bytes - put.staged);
      message_head head{
          .what = message_head::put, .offset = piece.offset + put.staged, .bytes = bytes};
      if (put.staged + bytes == piece.bytes) piece.signal_with(head);
      if (!stage(piece.to, head, piece.from + put.staged, &put.left)) return moved;
      put.staged += bytes;
      moved = true;
    } while (put.staged < piece.bytes);
  }
  return moved;
}

void courier::ask(far_get& get) {
  if (get.large) return large_->get(get);
  get.since = clock::now();
  const std::uint64_t id = next_id_++;
  asked_.emplace(id, &get);
  stage(get.from, {.what = message_head::get, .offset = get.offset, .bytes = get.bytes, .id = id},
        0, nullptr);
}

bool courier::answer() {
  bool moved = false;
  while (!answers_.empty()) {
    answering& now = answers_.front();
    const std::size_t bytes = std::min(chunk_bytes_, now.bytes - now.staged);
    if (!stage(now.to,
               {.what = message_head::answer, .offset = now.staged, .bytes = bytes, .id = now.id},
               own_.data.base + now.offset + now.staged, nullptr)) {
      break;
    }
    moved = true;
    now.staged += bytes;
    // By turns: a rank that asks for little does not wait for all that others asked for.
    if (now.staged < now.bytes) answers_.push_back(now);
    answers_.pop_front();
  }
  return moved;
}

bool courier::post() {
  bool moved = false;
  while (!staged_.empty() && (!staged_.front().chunk || on_.done(staged_.front().chunk->copied))) {
    sending_.push_back(std::move(staged_.front()));
    staged_.pop_front();
    parcel& next = sending_.back();
    next.since = clock::now();
    next.transfer = link_->send(next.to, next.message());
    if (next.left != nullptr) --*next.left;
    ++messages_sent_;
    moved = true;
  }
  return moved;
}

bool courier::finish_sends() {
  const auto finished = std::erase_if(sending_, [&](const parcel& sent) {
    if (!link_->done(*sent.transfer)) return false;
    if (sent.chunk) out_.give(*sent.chunk);
    return true;
  });
  return finished > 0;
}

// --- in -----------------------------------------------------------------------------------------

message_head courier::delivery::head() const {
  const std::byte* const from = chunk ? chunk->at : alone.data();
  message_head read;
  std::memcpy(&read, from, k_head);
  return read;
}

bool courier::begin_receives() {
  bool moved = false;
  for (;;) {
    if (!arrival_) arrival_ = link_->probe();
    if (!arrival_) return moved;
    if (arrival_->bytes < k_head || arrival_->bytes > k_head + chunk_bytes_) {
      throw peer_error(
          fmt::format("rank {} sent a message of {} bytes, of which there are {} to {}",
                      arrival_->from.value, arrival_->bytes, k_head, k_head + chunk_bytes_),
          "give every rank the same channel_options::chunk_bytes");
    }
    delivery next{.from = arrival_->from, .since = clock::now()};
    if (arrival_->bytes > k_head) {
      next.chunk = in_.take();
      if (!next.chunk) return moved;
    } else {
      next.alone.resize(k_head);
    }
    receiving_.push_back(std::move(next));
    delivery& begun = receiving_.back();
    std::byte* const into = begun.chunk ? begun.chunk->at : begun.alone.data();
    begun.transfer = link_->receive({into, arrival_->bytes});
    arrival_.reset();
    ++messages_received_;
    moved = true;
  }
}

bool courier::carry_out() {
  bool moved = false;
  std::set<rank_id> behind;  // ranks of which an earlier message is not carried out yet
  for (auto each = receiving_.begin(); each != receiving_.end();) {
    if (!each->complete && link_->done(*each->transfer)) each->complete = true;
    if (!each->complete || behind.contains(each->from) || !apply(*each)) {
      behind.insert(each->from);
      ++each;
      continue;
    }
    each = receiving_.erase(each);
    moved = true;
  }
  return moved;
}

bool courier::apply(delivery& message) {
  const message_head head = message.head();
  if (head.magic != message_head().magic) {
    throw peer_error(
        fmt::format("what came from rank {} is not a channel's message", message.from.value),
        "run the same evmm on all ranks");
  }
  switch (head.what) {
    case message_head::put:
      if (!own_.reach(head)) return false;
      apply_put(head, message);
      return true;
    case message_head::get:
      if (!own_.reach(head)) return false;
      on_.record(put_before_.get(), in_.stream());
      on_.wait(out_.stream(), put_before_.get());
      answers_.push_back({message.from, head.id, head.offset, head.bytes});
      return true;
    case message_head::answer:
      apply_answer(head, message);
      return true;
    default:
      if (!large_) throw unknown(head, message.from);
      return apply_large(head, message.from);
  }
}

bool courier::apply_large(const message_head& head, rank_id from) {
  switch (head.what) {
    case message_head::request_to_send:
      if (!own_.reach(head)) return false;
      large_->on_request_to_send(from, head);
      return true;
    case message_head::clear_to_send:
      if (head.id == 0 && !own_.reach(head)) return false;
      large_->on_clear_to_send(from, head);
      return true;
    case message_head::received:
      large_->on_received(from, head);
      return true;
    case message_head::in_line:
      large_->on_in_line(from);
      return true;
    default:
      throw unknown(head, from);
  }
}

/// Copies what a message brought to its place. Its chunk is the message's no more.
void courier::take_over(delivery& message, address to, std::size_t bytes, far_get* get) {
  applied_.push_back({*message.chunk, get, bytes});
  message.chunk.reset();
  const staging_chunk& chunk = applied_.back().chunk;
  on_.copy(to, reinterpret_cast<address>(chunk.at + k_head), bytes, in_.stream());
  on_.record(chunk.copied, in_.stream());
  bytes_received_ += bytes;
}

void courier::apply_put(const message_head& head, delivery& message) {
  if (message.chunk) take_over(message, own_.data.base + head.offset, head.bytes, nullptr);
  if (head.signals != message_head::none) {
    on_.store_word(own_.signalled(head).base + head.signal_offset, head.signal_value, in_.stream());
  }
}

void courier::apply_answer(const message_head& head, delivery& message) {
  const auto found = asked_.find(head.id);
  if (found == asked_.end() || !message.chunk || found->second->from != message.from ||
      head.offset + head.bytes > found->second->bytes) {
    throw peer_error(fmt::format("rank {} answered what nobody asked", message.from.value));
  }
  far_get& get = *found->second;
  take_over(message, get.into + head.offset, head.bytes, &get);
  // Answers come in order, so that this was the last one.
  if (head.offset + head.bytes == get.bytes) asked_.erase(found);
}

bool courier::finish_applied() {
  bool moved = false;
  while (!applied_.empty() && on_.done(applied_.front().chunk.copied)) {
    const applied& over = applied_.front();
    if (over.get != nullptr) {
      over.get->received += over.bytes;
      over.get->since = clock::now();
    }
    in_.give(over.chunk);
    applied_.pop_front();
    moved = true;
  }
  return moved;
}

bool courier::advance() {
  bool moved = post();
  moved = finish_sends() || moved;
  moved = begin_receives() || moved;
  moved = carry_out() || moved;
  moved = finish_applied() || moved;
  moved = answer() || moved;
  return (large_ && large_->advance()) || moved;
}

void courier::keep_time(clock::time_point now, std::chrono::milliseconds patience) {
  const auto late = [&](clock::time_point since) { return now - since >= patience; };
  const double seconds = std::chrono::duration<double>(patience).count();
  const char* const help = "see what became of it; EVMM_TIMEOUT_MS or set_timeout allows more time";
  for (const parcel& sent : sending_) {
    if (!late(sent.since)) continue;
    throw timed_out(fmt::format("rank {} has not taken a message of {} within {:.1f} s",
                                sent.to.value, format_bytes(sent.message().size()), seconds),
                    help);
  }
  for (const delivery& message : receiving_) {
    if (!late(message.since)) continue;
    if (!message.complete) {
      throw timed_out(fmt::format("a message of rank {} did not arrive within {:.1f} s",
                                  message.from.value, seconds),
                      help);
    }
    const message_head head = message.head();
    if (own_.reach(head)) continue;
    const bool signal = own_.data.holds(head.offset, head.bytes);
    throw peer_error(
        fmt::format("rank {} uses {} bytes at offset {} of this rank's part, which has {}",
                    message.from.value, signal ? sizeof(std::uint64_t) : head.bytes,
                    signal ? head.signal_offset : head.offset, own_.data.size.load()),
        "change a region on all ranks, and use what it had only before");
  }
  if (!large_) return;
  large_->reassure(now, patience);
  large_->check_deadlines(now, patience);
}

}  // namespace evmm
