// SPDX-License-Identifier: Apache-2.0
#include "comm/channel_state.hpp"
#include "comm/collective_change.hpp"
#include "lib/memory/device_scope.hpp"
#include "lib/support/format.hpp"
#include "lib/support/log.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <utility>

// How a channel comes to be and goes, and its calls between two ranks. Those of all ranks are in
// channel_collectives.cpp.

namespace evmm {

namespace {

constexpr std::size_t k_word = sizeof(std::uint64_t);
constexpr std::size_t k_largest_chunk = std::size_t{1} << 30;  // MPI counts bytes in an int

/// What every rank must give alike.
struct shared_options {
  std::uint64_t chunk_bytes;
  std::uint64_t check_counts;
  std::uint64_t large;
  std::uint64_t link_given;

  std::string text() const {
    return fmt::format("chunk_bytes {}, check_counts {}, large {}, {} link", chunk_bytes,
                       check_counts, large, link_given != 0 ? "a" : "no");
  }
  friend bool operator==(const shared_options&, const shared_options&) = default;
};

/// For what takes shared owners: the region keeps both alive longer than the channel.
template <class T>
std::shared_ptr<T> borrowed(T& of_the_region) {
  return {std::shared_ptr<void>(), &of_the_region};
}

void check_options(const channel_options& options) {
  if (options.chunk_bytes < k_word || options.chunk_bytes > k_largest_chunk) {
    throw invalid_argument(fmt::format("channel_options::chunk_bytes is {}; it takes {} to {}",
                                       options.chunk_bytes, k_word, k_largest_chunk));
  }
  if (options.chunks < 1)
    throw invalid_argument("channel_options::chunks is 0; it takes 1 or more");
}

}  // namespace

const char* to_string(channel_path path) noexcept {
  switch (path) {
    case channel_path::local:
      return "local";
    case channel_path::direct:
      return "direct";
    case channel_path::link:
      return "link";
  }
  return "unknown";
}

symmetric_channel::state::state(symmetric_region& over, const channel_options& options)
    : region(over),
      on(over.on()),
      ranks(over.ranks()),
      check_counts(options.check_counts),
      link(options.link) {
  agree_on(ranks, "symmetric_channel: options", [&] {
    check_options(options);
    if (link != nullptr && ranks.node_count() > 1) holds.emplace(link);
    latest.emplace(on, region.device());
  });
  const auto given =
      ranks.all_gather_value(shared_options{options.chunk_bytes, options.check_counts,
                                            options.large, options.link != nullptr},
                             "symmetric_channel: compare options");
  for (std::size_t r = 1; r < given.size(); ++r) {
    if (given[r] == given[0]) continue;
    throw invalid_argument(
        fmt::format("channel_options differ between ranks: rank 0 gave {}; rank {} gave {}",
                    given[0].text(), r, given[r].text()),
        "give every rank the same options");
  }
  if (ranks.node_count() == 1) {
    link = nullptr;
  } else if (link == nullptr) {
    link = ranks.make_link();
    holds.emplace(link);
  }
  if (link != nullptr) {
    counts.link = link->name();
    far = link->make_exchange(region);
    if (options.large) transfers = link->make_large_transfers(region.device());
  }
  if (transfers != nullptr) counts.large = transfers->way();

  const std::size_t words = channel_word_bytes(static_cast<std::size_t>(size()));
  control.emplace(borrowed(ranks), borrowed(on),
                  symmetric_options{.device = region.device(), .reserve = words});
  control->grow(options.signals, words);
  agree_on(ranks, "symmetric_channel: words", [&] {
    own.control.base = reinterpret_cast<address>(control->local());
    own.control.size = control->size();
    const device_scope current(on, region.device());  // whose default stream it is
    on.fill(own.control.base, std::byte{0}, control->size(), nullptr);
    on.synchronize(native_stream{nullptr});
  });
  agree_on(ranks, "symmetric_channel: start", [&] {
    own.data.base = reinterpret_cast<address>(region.local());
    look_at_region();
    follows = region.observe({.after_change = [this](const region_change&) { look_at_region(); }});
    engine.emplace(on, link, transfers, own,
                   courier::settings{region.device(), options.chunk_bytes, options.chunks});
    engine->set_patience(ranks.timeout());
  });
}

void symmetric_channel::state::close() {
  if (closed) return;
  std::exception_ptr failure;
  native_stream stream = nullptr;
  try {
    engine->drain();
    if (far != nullptr) far->drain();
    stream = on.create_stream(region.device());
    check_running();
    // Half of the time, so that a rank which finds a peer missing still meets the others.
    engine->set_patience(std::max(ranks.timeout() / 2, bootstrap::milliseconds(1)));
    barrier(stream);
    on.synchronize(stream);
    engine->drain();
    engine->check();
  } catch (...) {
    failure = std::current_exception();
  }
  if (stream != nullptr) log_failure("closing a channel", [&] { on.destroy_stream(stream); });
  closed = true;
  follows.reset();
  // A message is on its way until its receiver has it; MPI moves it while ranks meet here.
  try {
    ranks.agree(failure, "symmetric_channel: close");
  } catch (...) {
    failure = std::current_exception();
  }
  counts = statistics();
  end_engine(failure == nullptr);
  if (failure == nullptr && transfers != nullptr) {  // so it is on all ranks
    try {
      transfers->close();
    } catch (...) {
      failure = std::current_exception();
    }
  }
  transfers.reset();
  control.reset();
  far.reset();
  holds.reset();
  link.reset();
  if (failure != nullptr) std::rethrow_exception(failure);
}

void symmetric_channel::state::end_engine(bool everywhere) noexcept {
  if (!engine) return;
  engine->stop();
  if (holds && !everywhere && engine->mail()->messages_sent() > 0) holds->leave_behind();
  engine.reset();
}

void symmetric_channel::state::look_at_region() {
  own.data.size.store(region.size(), std::memory_order_release);
  discarded = region.segments(me());
  std::erase_if(discarded,
                [](const segment& each) { return each.state != segment_state::discarded; });
}

// --- checks -------------------------------------------------------------------------------------

void symmetric_channel::state::check_open() const {
  if (closed) throw invalid_argument("the symmetric channel was closed", "make a new one");
}

void symmetric_channel::state::check_running() {
  engine->check();
  if (far == nullptr) return;
  try {
    far->check();
  } catch (...) {
    engine->fail(describe_error(std::current_exception()));
    throw;
  }
}

void symmetric_channel::state::check_call(native_stream stream) {
  check_open();
  check_running();
  engine->set_patience(ranks.timeout());
  if (on.capture(stream).status != capture_status::none) {
    throw unsupported("a channel's calls cannot be captured: what they signal counts upwards",
                      "call it between launches of the graph");
  }
}

void symmetric_channel::state::check_rank(rank_id rank) const {
  if (rank.value >= 0 && rank.value < size()) return;
  throw invalid_argument(fmt::format("there is no rank {}: the job has {}", rank.value, size()));
}

void symmetric_channel::state::check_span(std::string_view what, std::size_t offset,
                                          std::size_t bytes) const {
  const std::size_t backed = region.size();
  if (bytes > backed || offset > backed - bytes) {
    throw invalid_argument(fmt::format("{}: {} bytes at offset {} end beyond the {} bytes that the "
                                       "region has on each rank",
                                       what, bytes, offset, backed),
                           "grow the region on all ranks first");
  }
  for (const segment& gone : discarded) {
    if (offset >= gone.offset + gone.bytes || gone.offset >= offset + bytes) continue;
    throw invalid_argument(fmt::format("{}: {} bytes at offset {}, where {} bytes at offset {} of "
                                       "the region are discarded",
                                       what, bytes, offset, gone.bytes, gone.offset),
                           "restore() the region on all ranks first");
  }
}

void symmetric_channel::state::check_memory(std::string_view what, address at,
                                            std::size_t bytes) const {
  if (at != 0 || bytes == 0) return;
  throw invalid_argument(fmt::format("{} of {} bytes at a null address", what, bytes));
}

void symmetric_channel::state::check_signal(const signal_word& signal) const {
  check_span("a signal", signal.offset, k_word);
  if (signal.offset % k_word == 0) return;
  throw invalid_argument(
      fmt::format("a signal at offset {}: it lies at a multiple of {}", signal.offset, k_word));
}

// --- between two ranks --------------------------------------------------------------------------

void symmetric_channel::state::count(channel_path path, std::size_t bytes) {
  auto& total = path == channel_path::local    ? counts.local_bytes
                : path == channel_path::direct ? counts.direct_bytes
                                               : counts.link_bytes;
  total += bytes;
}

channel_statistics symmetric_channel::state::statistics() const {
  channel_statistics now = counts;
  if (far != nullptr) now.exchange = far->way();
  if (const courier* const mail = engine ? engine->mail() : nullptr) {
    now.link_messages = mail->messages_sent();
    now.link_messages_received = mail->messages_received();
    now.link_bytes_received = mail->bytes_received();
  }
  return now;
}

void symmetric_channel::state::put(rank_id to, std::size_t offset, std::span<const std::byte> from,
                                   const std::optional<signal_word>& signal, native_stream stream) {
  check_call(stream);
  check_rank(to);
  check_span("a put", offset, from.size());
  if (signal) check_signal(*signal);
  if (from.empty() && !signal) return;
  const auto source = reinterpret_cast<address>(from.data());
  check_memory("a put", source, from.size());
  const channel_path way = path(to);
  if (way == channel_path::link) {
    const far_piece piece{.to = to,
                          .from = source,
                          .bytes = from.size(),
                          .offset = offset,
                          .signal = signal,
                          .large = goes_large(source, from.size())};
    engine->end(engine->begin_put({piece}, stream), stream);
    if (piece.large) counts.large_bytes += piece.bytes;
  } else {
    const auto base = reinterpret_cast<address>(region.peer(to));
    on.copy(base + offset, source, from.size(), stream);
    if (signal) on.store_word(base + signal->offset, signal->value, stream);
  }
  count(way, from.size());
}

void symmetric_channel::state::get(rank_id from, std::size_t offset, std::span<std::byte> into,
                                   native_stream stream) {
  check_call(stream);
  check_rank(from);
  check_span("a get", offset, into.size());
  if (into.empty()) return;
  const auto target = reinterpret_cast<address>(into.data());
  check_memory("a get", target, into.size());
  const channel_path way = path(from);
  if (way == channel_path::link) {
    const far_get wanted{.from = from,
                         .offset = offset,
                         .into = target,
                         .bytes = into.size(),
                         .large = goes_large(target, into.size())};
    engine->get(wanted, stream);
    if (wanted.large) counts.large_bytes += wanted.bytes;
  } else {
    on.copy(target, reinterpret_cast<address>(region.peer(from)) + offset, into.size(), stream);
  }
  count(way, into.size());
}

void symmetric_channel::state::wait_signal(rank_id from, const signal_word& signal,
                                           native_stream stream) {
  check_call(stream);
  check_rank(from);
  check_signal(signal);
  engine->wait(own.data.base + signal.offset, signal.value, from,
               fmt::format("{} at offset {} (wait_signal)", signal.value, signal.offset), stream);
}

// --- the face -----------------------------------------------------------------------------------

symmetric_channel::symmetric_channel(symmetric_region& region, const channel_options& options)
    : state_(std::make_unique<state>(region, options)) {}
symmetric_channel::symmetric_channel(symmetric_channel&&) noexcept = default;
symmetric_channel& symmetric_channel::operator=(symmetric_channel&&) noexcept = default;
symmetric_channel::~symmetric_channel() = default;

void symmetric_channel::close() {
  state_->close();
}
symmetric_region& symmetric_channel::region() const noexcept {
  return state_->region;
}
channel_path symmetric_channel::path_to(rank_id rank) const {
  state_->check_open();
  state_->check_rank(rank);
  return state_->path(rank);
}
channel_statistics symmetric_channel::statistics() const {
  return state_->statistics();
}
void symmetric_channel::put(rank_id to, std::size_t offset, std::span<const std::byte> from,
                            native_stream stream) {
  const auto here = state_->enter();
  state_->put(to, offset, from, std::nullopt, stream);
}
void symmetric_channel::put_signal(rank_id to, std::size_t offset, std::span<const std::byte> from,
                                   signal_word signal, native_stream stream) {
  const auto here = state_->enter();
  state_->put(to, offset, from, signal, stream);
}
void symmetric_channel::signal(rank_id to, signal_word signal, native_stream stream) {
  const auto here = state_->enter();
  state_->put(to, signal.offset, {}, signal, stream);
}
void symmetric_channel::get(rank_id from, std::size_t offset, std::span<std::byte> into,
                            native_stream stream) {
  const auto here = state_->enter();
  state_->get(from, offset, into, stream);
}
void symmetric_channel::wait_signal(rank_id from, signal_word signal, native_stream stream) {
  const auto here = state_->enter();
  state_->wait_signal(from, signal, stream);
}
void symmetric_channel::barrier(native_stream stream) {
  const auto here = state_->enter();
  state_->check_call(stream);
  state_->barrier(stream);
}
void symmetric_channel::all_to_all_v(std::span<const outgoing_block> out,
                                     std::span<const incoming_block> in, native_stream stream) {
  const auto here = state_->enter();
  state_->all_to_all_v(out, in, stream);
}
void symmetric_channel::check() const {
  state_->check_open();
  state_->check_running();
}
void symmetric_channel::synchronize(native_stream stream) {
  state_->check_open();
  const auto here = state_->enter();
  state_->on.synchronize(stream);
  state_->check_running();
}

}  // namespace evmm
