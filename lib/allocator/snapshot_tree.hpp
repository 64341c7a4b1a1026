// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/allocator/snapshot.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace [[gnu::visibility("default")]] evmm {

/// Boundaries and values of a list in the configuration's grammar, `[1:0,2:4]`.
using setting_list = std::vector<std::pair<std::string_view, std::int64_t>>;
/// A setting as PyTorch types it.
using setting_value = std::variant<std::string_view, bool, std::int64_t, double, setting_list>;
/// Text of a setting that PyTorch types otherwise becomes that type where it can be read so.
setting_value typed_setting(std::string_view name, std::string_view text);

/// Writes the tree that PyTorch's memory viewer reads, with its names and in its order. A writer
/// has `dict(items)`, `key(name)`, `list(range, write)`, `integer`, `real`, `truth`, `text`,
/// `pair(first, second)` and `frames(stack)`.
template <class Writer>
class snapshot_tree {
 public:
  explicit snapshot_tree(Writer& to) : to_(to) {}

  void write(const allocator_snapshot& snapshot) {
    to_.dict([&] {
      to_.key("segments");
      to_.list(snapshot.segments, [&](const auto& segment) { write(segment); });
      to_.key("device_traces");
      to_.list(snapshot.device_traces, [&](const auto& trace) {
        to_.list(trace, [&](const auto& entry) { write(entry); });
      });
      to_.key("allocator_settings");
      to_.dict([&] {
        for (const auto& [name, text] : snapshot.settings) write_setting(name, text);
      });
      to_.key("external_annotations");
      to_.list(snapshot.external_annotations, [&](const auto& mark) { write(mark); });
    });
  }

 private:
  void integer(std::string_view key, std::uint64_t value) {
    to_.key(key);
    to_.integer(value);
  }
  void signed_integer(std::string_view key, std::int64_t value) {
    to_.key(key);
    to_.integer(value);
  }
  void text(std::string_view key, std::string_view value) {
    to_.key(key);
    to_.text(value);
  }
  void pool(std::string_view key, const pool_number& number) {
    to_.key(key);
    to_.pair(number.first, number.second);
  }
  void stream(native_stream value) {
    integer("stream", reinterpret_cast<std::uintptr_t>(value));  // NOLINT: as PyTorch has it
  }
  void frames(const std::vector<stack_frame>& stack) {
    to_.key("frames");
    to_.frames(stack);
  }

  void write(const segment_snapshot& segment) {
    to_.dict([&] {
      signed_integer("device", segment.device);
      integer("address", segment.at);
      integer("total_size", segment.total_bytes);
      integer("allocated_size", segment.allocated_bytes);
      integer("active_size", segment.active_bytes);
      integer("requested_size", segment.requested_bytes);
      stream(segment.stream);
      text("segment_type", segment.large ? "large" : "small");
      pool("segment_pool_id", segment.pool);
      to_.key("is_expandable");
      to_.truth(segment.expandable);
      // PyTorch has no such memory, and its viewer passes over keys that it does not know.
      if (segment.where == tier::host) text("tier", "host");
      frames(segment.frames);
      to_.key("blocks");
      to_.list(segment.blocks, [&](const auto& block) { write(block); });
    });
  }

  void write(const block_snapshot& block) {
    to_.dict([&] {
      integer("address", block.at);
      integer("size", block.bytes);
      integer("requested_size", block.requested_bytes);
      text("state", to_string(block.state));
      frames(block.frames);
    });
  }

  void write(const trace_entry& entry) {
    to_.dict([&] {
      text("action", to_string(entry.action));
      integer(entry.action == trace_action::oom ? "device_free" : "addr", entry.at);
      integer("size", entry.bytes);
      stream(entry.stream);
      text("compile_context", entry.compile_context);
      text("user_metadata", entry.user_metadata);
      signed_integer("time_us", entry.time_us);
      pool("pool_id", entry.pool);
      // Unlike blocks, entries without a stack have no such key.
      if (!entry.frames.empty()) frames(entry.frames);
    });
  }

  void write(const annotation& mark) {
    to_.dict([&] {
      for (const auto& [name, value] : mark.values) text(name, value);
      signed_integer("device", mark.device);
      signed_integer("time_us", mark.time_us);
    });
  }

  void write_setting(std::string_view name, std::string_view text) {
    to_.key(name);
    write_value(typed_setting(name, text));
  }

  void write_value(const setting_value& value) {
    if (const auto* text = std::get_if<std::string_view>(&value)) return to_.text(*text);
    if (const auto* truth = std::get_if<bool>(&value)) return to_.truth(*truth);
    if (const auto* number = std::get_if<std::int64_t>(&value)) return to_.integer(*number);
    if (const auto* number = std::get_if<double>(&value)) return to_.real(*number);
    to_.dict([&] {
      for (const auto& [boundary, number] : std::get<setting_list>(value)) {
        signed_integer(boundary, number);
      }
    });
  }

  Writer& to_;
};

}  // namespace evmm
