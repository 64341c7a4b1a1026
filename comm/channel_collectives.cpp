// SPDX-License-Identifier: Apache-2.0
#include "comm/channel_state.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <utility>

// The calls of a channel that all ranks make together. All are made of words and copies: a rank
// announces, waits for the words of the others, and nobody is asked twice.

namespace evmm {

template <class Body>
void symmetric_channel::state::whole(native_stream stream, Body&& body) {
  try {
    on.wait(stream, latest->get());
    body();
    on.record(latest->get(), stream);
  } catch (...) {
    engine->fail(describe_error(std::current_exception()));
    throw;
  }
}

std::size_t symmetric_channel::state::word_offset(word kind, rank_id sender) const {
  const auto row = static_cast<std::size_t>(kind) * static_cast<std::size_t>(size());
  return (row + static_cast<std::size_t>(sender.value)) * sizeof(std::uint64_t);
}

address symmetric_channel::state::word_address(rank_id of, word kind, rank_id sender) const {
  return reinterpret_cast<address>(control->peer(of)) + word_offset(kind, sender);
}

template <class Choose>
void symmetric_channel::state::announce(word kind, std::uint64_t round, native_stream stream,
                                        Choose&& choose) {
  std::vector<far_piece> far;
  for (int i = 1; i < size(); ++i) {
    const rank_id to{(me().value + i) % size()};
    if (!choose(to)) continue;
    if (path(to) == channel_path::direct) {
      on.store_word(word_address(to, kind, me()), round, stream);
    } else {
      far.push_back(
          {.to = to, .signal = signal_word{word_offset(kind, me()), round}, .control = true});
    }
  }
  if (!far.empty()) engine->end(engine->begin_put(std::move(far), stream), stream);
}

void symmetric_channel::state::wait_for_word(word kind, std::uint64_t round, rank_id from,
                                             std::string name, native_stream stream) {
  engine->wait(word_address(me(), kind, from), round, from, std::move(name), stream);
}

void symmetric_channel::state::barrier(native_stream stream) {
  const std::string name = fmt::format("barrier {}", ++barriers);
  // A word from a rank of another node tells that what it put here has arrived, not what it put to
  // others. Once all have said that they have all words, that has arrived as well.
  const int turns = barrier_turns(ranks.node_count());
  whole(stream, [&] {
    for (int turn = 0; turn < turns; ++turn) {
      announce(word::barrier, ++barrier_words, stream, [](rank_id) { return true; });
      for (int r = 0; r < size(); ++r) {
        if (rank_id{r} != me()) wait_for_word(word::barrier, barrier_words, {r}, name, stream);
      }
    }
  });
}

// --- all to all ---------------------------------------------------------------------------------

void symmetric_channel::state::check_blocks(std::span<const outgoing_block> out,
                                            std::span<const incoming_block> in) const {
  const auto ranks_of_job = static_cast<std::size_t>(size());
  if (out.size() != ranks_of_job || in.size() != ranks_of_job) {
    throw invalid_argument(
        fmt::format("all_to_all_v with {} blocks out and {} in, of a job of {} ranks", out.size(),
                    in.size(), ranks_of_job),
        "give one block for each rank, of 0 bytes where there is nothing to send");
  }
  for (std::size_t r = 0; r < ranks_of_job; ++r) {
    const auto checked = [&](const char* what, std::size_t offset, std::size_t bytes) {
      if (bytes > 0)
        check_span(fmt::format("all_to_all_v: what {} rank {}", what, r), offset, bytes);
    };
    checked("goes to", out[r].from, out[r].bytes);
    checked("is written at", out[r].to, out[r].bytes);
    checked("comes from", in[r].at, in[r].bytes);
  }
  const auto self = static_cast<std::size_t>(me().value);
  if (out[self].bytes != in[self].bytes || (out[self].bytes > 0 && out[self].to != in[self].at)) {
    throw invalid_argument(fmt::format(
        "all_to_all_v: this rank sends itself {} bytes to offset {} and receives {} at offset {}",
        out[self].bytes, out[self].to, in[self].bytes, in[self].at));
  }
}

/// Every rank finds the same difference: all see all blocks.
void symmetric_channel::state::compare_blocks(std::span<const outgoing_block> out,
                                              std::span<const incoming_block> in) {
  wire_writer mine;
  for (const outgoing_block& block : out) mine.put(block);
  for (const incoming_block& block : in) mine.put(block);
  const auto all = ranks.all_gather(mine.take(), "all_to_all_v: compare counts");
  std::vector<std::vector<outgoing_block>> sent;
  std::vector<std::vector<incoming_block>> expected;
  for (int r = 0; r < size(); ++r) {
    wire_reader read(all[static_cast<std::size_t>(r)], fmt::format("rank {}", r));
    auto& blocks_out = sent.emplace_back();
    for (int i = 0; i < size(); ++i) blocks_out.push_back(read.get<outgoing_block>());
    auto& blocks_in = expected.emplace_back();
    for (int i = 0; i < size(); ++i) blocks_in.push_back(read.get<incoming_block>());
  }
  for (std::size_t from = 0; from < sent.size(); ++from) {
    for (std::size_t to = 0; to < sent.size(); ++to) {
      const outgoing_block& goes = sent[from][to];
      const incoming_block& comes = expected[to][from];
      if (goes.bytes == comes.bytes && (goes.bytes == 0 || goes.to == comes.at)) continue;
      throw invalid_argument(
          fmt::format("all_to_all_v: rank {} sends {} bytes to offset {} of rank {}, which expects "
                      "{} bytes at offset {}",
                      from, goes.bytes, goes.to, to, comes.bytes, comes.at),
          "make both ranks compute the same counts");
    }
  }
}

void symmetric_channel::state::all_to_all_v(std::span<const outgoing_block> out,
                                            std::span<const incoming_block> in,
                                            native_stream stream) {
  std::exception_ptr wrong;
  try {
    check_call(stream);
    check_blocks(out, in);
  } catch (...) {
    wrong = std::current_exception();
  }
  if (check_counts) {
    ranks.agree(wrong, "all_to_all_v: check blocks");
    compare_blocks(out, in);
  } else if (wrong != nullptr) {
    std::rethrow_exception(wrong);
  }
  whole(stream, [&] { move_blocks(out, in, stream); });
  for (int r = 0; r < size(); ++r) count(path({r}), out[static_cast<std::size_t>(r)].bytes);
}

void symmetric_channel::state::move_blocks(std::span<const outgoing_block> out,
                                           std::span<const incoming_block> in,
                                           native_stream stream) {
  const std::uint64_t round = ++exchanges;
  const std::string name = fmt::format("all_to_all_v {}", round);
  const auto bytes_from = [&](rank_id rank) {
    return in[static_cast<std::size_t>(rank.value)].bytes;
  };
  // What exchanges in stream order needs no words.
  const bool exchanged = far != nullptr;
  const auto by_words = [&](rank_id rank) {
    return path(rank) == channel_path::direct || (path(rank) == channel_path::link && !exchanged);
  };
  std::vector<far_piece> messages;
  std::vector<node_exchange::block> far_out;
  std::vector<node_exchange::block> far_in;
  announce(word::ready, round, stream,
           [&](rank_id from) { return bytes_from(from) > 0 && by_words(from); });
  for (int i = 1; i < size(); ++i) {
    const rank_id to{(me().value + i) % size()};
    const outgoing_block& block = out[static_cast<std::size_t>(to.value)];
    const incoming_block& expected = in[static_cast<std::size_t>(to.value)];
    if (path(to) != channel_path::link) continue;
    if (exchanged) {
      if (block.bytes > 0) far_out.push_back({to, block.from, block.bytes, block.to});
      if (expected.bytes > 0) far_in.push_back({to, expected.at, expected.bytes});
    } else if (block.bytes > 0) {
      wait_for_word(word::ready, round, to, name, stream);
      messages.push_back({to, own.data.base + block.from, block.bytes, block.to,
                          signal_word{word_offset(word::data, me()), round}, true});
    }
  }
  // The messages to other nodes go out while the stream copies within this one.
  channel_engine::operation* const under_way =
      messages.empty() ? nullptr : &engine->begin_put(std::move(messages), stream);
  for (int i = 0; i < size(); ++i) {
    const rank_id to{(me().value + i) % size()};
    const outgoing_block& block = out[static_cast<std::size_t>(to.value)];
    const channel_path way = path(to);
    if (block.bytes == 0 || way == channel_path::link) continue;
    if (way == channel_path::direct) wait_for_word(word::ready, round, to, name, stream);
    on.copy(reinterpret_cast<address>(region.peer(to)) + block.to, own.data.base + block.from,
            block.bytes, stream);
    if (way == channel_path::direct) {
      on.store_word(word_address(to, word::data, me()), round, stream);
    }
  }
  if (under_way != nullptr) engine->end(*under_way, stream);
  if (exchanged) far->exchange(far_out, far_in, stream);
  for (int r = 0; r < size(); ++r) {
    if (bytes_from({r}) > 0 && by_words({r})) {
      wait_for_word(word::data, round, {r}, name, stream);
    }
  }
}

}  // namespace evmm
