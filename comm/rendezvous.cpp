// SPDX-License-Identifier: Apache-2.0
#include "comm/rendezvous.hpp"

#include "lib/support/format.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <utility>

namespace evmm {

rendezvous::rendezvous(driver& on, device_id device, std::shared_ptr<large_transfers> by,
                       const own_parts& own, native_stream in, sender say)
    : on_(on),
      own_(own),
      in_(in),
      say_(std::move(say)),
      put_before_(on, device),
      by_(std::move(by)) {}

/// What a rank put before is there, or on its way on the stream.
native_event rendezvous::behind_earlier_puts() {
  on_.record(put_before_.get(), in_);
  return put_before_.get();
}

// --- this rank's --------------------------------------------------------------------------------

void rendezvous::put(const far_piece& piece, std::size_t& left) {
  message_head head{.what = message_head::request_to_send,
                    .offset = piece.offset,
                    .bytes = piece.bytes,
                    .id = next_id_++};
  piece.signal_with(head);
  asked_.emplace(head.id, request{piece, &left, clock::now()});
  ++left;
  say_(piece.to, head);
}

void rendezvous::get(far_get& wanted) {
  in_line_.push_back({.from = wanted.from,
                      .into = wanted.into,
                      .head = {.what = message_head::clear_to_send,
                               .offset = wanted.offset,
                               .bytes = wanted.bytes},
                      .get = &wanted});
}

// --- heads that came ----------------------------------------------------------------------------

void rendezvous::on_request_to_send(rank_id from, const message_head& head) {
  in_line_.push_back({.from = from, .into = own_.data.base + head.offset, .head = head});
}

rendezvous::request& rendezvous::asked(rank_id of, const message_head& head) {
  const auto found = asked_.find(head.id);
  if (found == asked_.end() || found->second.piece.to != of ||
      head.offset + head.bytes > found->second.piece.bytes) {
    throw peer_error(fmt::format("rank {} is ready to receive what nobody asked it to", of.value));
  }
  return found->second;
}

void rendezvous::on_clear_to_send(rank_id from, const message_head& head) {
  const auto now = clock::now();
  address source = own_.data.base + head.offset;
  if (head.id != 0) {
    request& put = asked(from, head);
    put.since = now;
    source = put.piece.from + head.offset;
  }
  sending_.push_back(
      {from, head.bytes, by_->send(from, source, head.bytes, behind_earlier_puts()), now, now});
}

void rendezvous::on_received(rank_id from, const message_head& head) {
  --*asked(from, head).left;
  asked_.erase(head.id);
}

void rendezvous::on_in_line(rank_id from) {
  const auto now = clock::now();
  for (auto& [id, put] : asked_) {
    if (put.piece.to == from) put.since = now;
  }
  if (receiving_ && receiving_->of.from == from) receiving_->since = now;
}

// --- what moves ---------------------------------------------------------------------------------

void rendezvous::begin_receive() {
  const arrival next = in_line_.front();
  in_line_.pop_front();
  const std::size_t bytes = std::min(by_->most(), next.head.bytes - next.received);
  const auto transfer =
      by_->receive(next.from, next.into + next.received, bytes, behind_earlier_puts());
  // A get's owner is told where in its part, a put's sender where in what it offered.
  say_(next.from, {.what = message_head::clear_to_send,
                   .offset = next.received + (next.get != nullptr ? next.head.offset : 0),
                   .bytes = bytes,
                   .id = next.head.id});
  receiving_ = piece{next, bytes, transfer, clock::now()};
}

void rendezvous::finish_receive() {
  arrival got = receiving_->of;
  got.received += receiving_->bytes;
  bytes_received_ += receiving_->bytes;
  receiving_.reset();
  moved_on_ = true;
  if (got.get != nullptr) got.get->received = got.received;
  if (got.received < got.head.bytes) {
    in_line_.push_back(got);
    return;
  }
  if (got.get != nullptr) return;
  if (got.head.signals != message_head::none) {
    on_.store_word(own_.signalled(got.head).base + got.head.signal_offset, got.head.signal_value,
                   in_);
  }
  say_(got.from, {.what = message_head::received, .id = got.head.id});
}

bool rendezvous::advance() {
  bool moved = false;
  if (receiving_ && by_->done(receiving_->transfer)) {
    finish_receive();
    moved = true;
  }
  if (!receiving_ && !in_line_.empty()) {
    begin_receive();
    moved = true;
  }
  bool sent = false;
  for (auto each = sending_.begin(); each != sending_.end();) {
    if (by_->done(each->transfer)) {
      each = sending_.erase(each);
      sent = true;
      continue;
    }
    if (sent) {
      each->since = clock::now();
      each->nearer = true;
    }
    ++each;
  }
  return sent || moved;
}

void rendezvous::reassure(clock::time_point now, std::chrono::milliseconds patience) {
  std::set<rank_id> waiting;
  if (moved_on_ && now - reassured_ >= patience / 4) {
    moved_on_ = false;
    reassured_ = now;
    for (const arrival& each : in_line_) {
      if (each.get == nullptr) waiting.insert(each.from);
    }
  }
  for (departure& each : sending_) {
    if (!each.nearer || now - each.reassured < patience / 4) continue;
    each.nearer = false;
    each.reassured = now;
    waiting.insert(each.to);
  }
  for (const rank_id rank : waiting) say_(rank, {.what = message_head::in_line});
}

void rendezvous::check_deadlines(clock::time_point now, std::chrono::milliseconds patience) const {
  const auto late = [&](clock::time_point since) { return now - since >= patience; };
  const auto blame = [&](rank_id rank, std::string_view what, std::size_t bytes) {
    throw timed_out(
        fmt::format("rank {} {} {} within {:.1f} s", rank.value, what, format_bytes(bytes),
                    std::chrono::duration<double>(patience).count()),
        "see what became of it; EVMM_TIMEOUT_MS or set_timeout allows more time");
  };
  for (const auto& [id, put] : asked_) {
    if (late(put.since)) blame(put.piece.to, "has not taken a put of", put.piece.bytes);
  }
  // Whoever is in line waits for this one alone.
  if (receiving_ && late(receiving_->since)) {
    const arrival& of = receiving_->of;
    if (of.get != nullptr) blame(of.from, "did not answer a get of", of.head.bytes);
    blame(of.from, "did not send", receiving_->bytes);
  }
  for (const departure& each : sending_) {
    if (late(each.since)) blame(each.to, "did not receive", each.bytes);
  }
}

}  // namespace evmm
