// SPDX-License-Identifier: Apache-2.0
#include "lib/allocator/options_grammar.hpp"
#include "lib/allocator/pickle.hpp"

#include <evmm/allocator/snapshot.hpp>
#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace evmm {

namespace {

/// Takes a snapshot out of a pickle. Keys that it does not know are passed over: PyTorch's versions
/// differ. What they have in common must be there.
class snapshot_reader {
 public:
  explicit snapshot_reader(std::string_view bytes) : document_(bytes) {}

  allocator_snapshot read() {
    const pickle_value& root = document_.root();
    allocator_snapshot snapshot;
    bool segments = false;
    bool traces = false;
    each_pair(root, "a snapshot", [&](std::string_view key, const pickle_value& value) {
      if (key == "segments") {
        segments = true;
        each(value, key, [&](const auto& item) { snapshot.segments.push_back(segment(item)); });
      } else if (key == "device_traces") {
        traces = true;
        each(value, key, [&](const auto& item) {
          const int device = static_cast<int>(snapshot.device_traces.size());
          snapshot.device_traces.push_back(trace(item, device));
        });
      } else if (key == "allocator_settings") {
        each_pair(value, key, [&](std::string_view name, const pickle_value& setting) {
          snapshot.settings.emplace_back(name, as_text(setting));
        });
      } else if (key == "external_annotations") {
        each(value, key,
             [&](const auto& item) { snapshot.external_annotations.push_back(mark(item)); });
      }
    });
    if (!segments) refuse_missing(root, "a snapshot", "segments");
    if (!traces) refuse_missing(root, "a snapshot", "device_traces");
    return snapshot;
  }

 private:
  // --- errors -----------------------------------------------------------------------------------

  [[noreturn]] static void refuse(const pickle_value& value, const std::string& what) {
    throw invalid_argument(fmt::format("pickle, byte {}: {}", value.at, what),
                           "give what torch.cuda.memory._dump_snapshot or to_pickle wrote");
  }
  [[noreturn]] static void refuse_kind(const pickle_value& value, std::string_view key,
                                       std::string_view expected) {
    refuse(value, fmt::format("{} is {}, not {}", key, to_string(value.kind), expected));
  }
  [[noreturn]] static void refuse_missing(const pickle_value& value, std::string_view what,
                                          std::string_view key) {
    refuse(value, fmt::format("{} without '{}'", what, key));
  }

  // --- values -----------------------------------------------------------------------------------

  template <class Take>
  void each(const pickle_value& list, std::string_view key, Take&& take) const {
    if (list.kind != pickle_kind::list && list.kind != pickle_kind::tuple) {
      refuse_kind(list, key, "a list");
    }
    for (const pickle_value& item : document_.items(list)) take(item);
  }

  template <class Take>
  void each_pair(const pickle_value& dict, std::string_view what, Take&& take) const {
    if (dict.kind != pickle_kind::dict) refuse_kind(dict, what, "a dict");
    const auto items = document_.items(dict);
    for (std::size_t i = 0; i < items.size(); i += 2) {
      if (items[i].kind == pickle_kind::text) take(document_.text(items[i]), items[i + 1]);
    }
  }

  static std::int64_t signed_integer(const pickle_value& value, std::string_view key) {
    if (value.kind != pickle_kind::integer) refuse_kind(value, key, "an integer");
    if (!value.negative && value.bits >> 63 != 0) {
      refuse(value, fmt::format("{} is {}, too large", key, value.bits));
    }
    return static_cast<std::int64_t>(value.bits);
  }

  /// Addresses, streams and numbers of pools: PyTorch writes the upper half as negative.
  static std::uint64_t bits(const pickle_value& value, std::string_view key) {
    if (value.kind != pickle_kind::integer) refuse_kind(value, key, "an integer");
    return value.bits;
  }

  static std::size_t size(const pickle_value& value, std::string_view key) {
    const std::size_t bytes = bits(value, key);
    if (value.negative) {
      refuse(value,
             fmt::format("{} is {}, a negative size", key, static_cast<std::int64_t>(value.bits)));
    }
    return bytes;
  }

  static native_stream stream(const pickle_value& value) {
    return reinterpret_cast<native_stream>(bits(value, "stream"));  // NOLINT: as it was written
  }

  static int device(const pickle_value& value) {
    const std::int64_t number = signed_integer(value, "device");
    if (number < 0 || number > std::numeric_limits<int>::max()) {
      refuse(value, fmt::format("device is {}", number));
    }
    return static_cast<int>(number);
  }

  static bool truth(const pickle_value& value, std::string_view key) {
    if (value.kind != pickle_kind::truth) refuse_kind(value, key, "a bool");
    return value.bits != 0;
  }

  std::string_view text(const pickle_value& value, std::string_view key) const {
    if (value.kind != pickle_kind::text) refuse_kind(value, key, "a string");
    return document_.text(value);
  }

  std::string optional_text(const pickle_value& value) const {
    return value.kind == pickle_kind::none ? std::string() : as_text(value);
  }

  pool_number pool(const pickle_value& value, std::string_view key) const {
    const auto items = value.kind == pickle_kind::tuple || value.kind == pickle_kind::list
                           ? document_.items(value)
                           : std::span<const pickle_value>{};
    if (items.size() != 2) refuse_kind(value, key, "two integers");
    return {bits(items[0], key), bits(items[1], key)};
  }

  /// What typed_setting reads back.
  std::string as_text(const pickle_value& value, bool nested = false) const {
    switch (value.kind) {
      case pickle_kind::none:
        return "None";
      case pickle_kind::truth:
        return value.bits != 0 ? "True" : "False";
      case pickle_kind::integer:
        return value.negative ? fmt::format("{}", static_cast<std::int64_t>(value.bits))
                              : fmt::format("{}", value.bits);
      case pickle_kind::real:
        return fmt::format("{}", pickle_document::real(value));
      case pickle_kind::text:
        return std::string(document_.text(value));
      case pickle_kind::list:
      case pickle_kind::tuple:
      case pickle_kind::dict:
        break;
    }
    // A container may hold itself.
    if (nested) return "...";
    const auto items = document_.items(value);
    const bool pairs = value.kind == pickle_kind::dict;
    std::string list;
    for (std::size_t i = 0; i < items.size(); ++i) {
      if (i != 0) list += pairs && i % 2 != 0 ? ':' : ',';
      list += as_text(items[i], true);
    }
    return fmt::format("[{}]", list);
  }

  // --- parts of a snapshot ----------------------------------------------------------------------

  /// Most entries share their stack with others: each is read once.
  const std::vector<stack_frame>& frames(const pickle_value& value) {
    if (value.kind == pickle_kind::none) return no_frames_;
    const bool list = value.kind == pickle_kind::list || value.kind == pickle_kind::tuple;
    if (!list) refuse_kind(value, "frames", "a list");
    const auto [known, fresh] = stacks_.try_emplace(value.bits);
    if (fresh) known->second = read_frames(value);
    return known->second;
  }

  std::vector<stack_frame> read_frames(const pickle_value& value) const {
    std::vector<stack_frame> stack;
    each(value, "frames", [&](const pickle_value& item) {
      stack_frame& frame = stack.emplace_back();
      each_pair(item, "a frame", [&](std::string_view key, const pickle_value& part) {
        if (key == "name") {
          frame.name = text(part, key);
        } else if (key == "filename") {
          frame.filename = text(part, key);
        } else if (key == "line") {
          // -1 where there is none.
          const std::int64_t line = std::max<std::int64_t>(signed_integer(part, key), 0);
          if (line > std::numeric_limits<std::uint32_t>::max()) {
            refuse(part, fmt::format("line is {}", line));
          }
          frame.line = static_cast<std::uint32_t>(line);
        }
      });
    });
    return stack;
  }

  segment_snapshot segment(const pickle_value& value) {
    segment_snapshot segment;
    std::optional<address> at;
    const pickle_value* blocks = nullptr;
    each_pair(value, "a segment", [&](std::string_view key, const pickle_value& part) {
      if (key == "device") {
        segment.device = device(part);
      } else if (key == "address") {
        at = bits(part, key);
      } else if (key == "total_size") {
        segment.total_bytes = size(part, key);
      } else if (key == "allocated_size") {
        segment.allocated_bytes = size(part, key);
      } else if (key == "active_size") {
        segment.active_bytes = size(part, key);
      } else if (key == "requested_size") {
        segment.requested_bytes = size(part, key);
      } else if (key == "stream") {
        segment.stream = stream(part);
      } else if (key == "segment_type") {
        const std::string_view type = text(part, key);
        if (type != "large" && type != "small") {
          refuse(part,
                 fmt::format("segment_type is {}, neither large nor small", quote_option(type)));
        }
        segment.large = type == "large";
      } else if (key == "segment_pool_id") {
        segment.pool = pool(part, key);
      } else if (key == "is_expandable") {
        segment.expandable = truth(part, key);
      } else if (key == "tier") {
        segment.where = text(part, key) == "host" ? tier::host : tier::device;
      } else if (key == "frames") {
        segment.frames = frames(part);
      } else if (key == "blocks") {
        blocks = &part;
      }
    });
    if (!at) refuse_missing(value, "a segment", "address");
    if (blocks == nullptr) refuse_missing(value, "a segment", "blocks");
    segment.at = *at;
    // Older versions of PyTorch do not say where a block is: they follow each other.
    address next = *at;
    each(*blocks, "blocks", [&](const pickle_value& item) {
      segment.blocks.push_back(block(item, next));
      next = segment.blocks.back().at + segment.blocks.back().bytes;
    });
    return segment;
  }

  block_snapshot block(const pickle_value& value, address at) {
    block_snapshot block{.at = at};
    bool sized = false;
    each_pair(value, "a block", [&](std::string_view key, const pickle_value& part) {
      if (key == "address") {
        block.at = bits(part, key);
      } else if (key == "size") {
        sized = true;
        block.bytes = size(part, key);
      } else if (key == "requested_size") {
        block.requested_bytes = size(part, key);
      } else if (key == "state") {
        block.state = state(part);
      } else if (key == "frames") {
        block.frames = frames(part);
      }
    });
    if (!sized) refuse_missing(value, "a block", "size");
    return block;
  }

  block_state state(const pickle_value& value) const {
    const std::string_view name = text(value, "state");
    for (const block_state state :
         {block_state::active_allocated, block_state::active_pending_free, block_state::inactive}) {
      if (name == to_string(state)) return state;
    }
    // The name in PyTorch's documentation.
    if (name == "active_awaiting_free") return block_state::active_pending_free;
    refuse(value, fmt::format("state is {}, none of active_allocated, active_pending_free and "
                              "inactive",
                              quote_option(name)));
  }

  std::vector<trace_entry> trace(const pickle_value& value, int device) {
    std::vector<trace_entry> entries;
    each(value, "a device's trace", [&](const pickle_value& item) {
      entries.push_back(entry(item));
      entries.back().device = device;
    });
    return entries;
  }

  trace_entry entry(const pickle_value& value) {
    trace_entry entry;
    bool acted = false;
    each_pair(value, "a trace entry", [&](std::string_view key, const pickle_value& part) {
      if (key == "action") {
        acted = true;
        entry.action = action(part);
      } else if (key == "addr" || key == "device_free") {
        entry.at = bits(part, key);
      } else if (key == "size") {
        entry.bytes = size(part, key);
      } else if (key == "stream") {
        entry.stream = stream(part);
      } else if (key == "time_us") {
        entry.time_us = signed_integer(part, key);
      } else if (key == "pool_id") {
        entry.pool = pool(part, key);
      } else if (key == "compile_context") {
        entry.compile_context = optional_text(part);
      } else if (key == "user_metadata") {
        entry.user_metadata = optional_text(part);
      } else if (key == "frames") {
        entry.frames = frames(part);
      }
    });
    if (!acted) refuse_missing(value, "a trace entry", "action");
    return entry;
  }

  trace_action action(const pickle_value& value) const {
    const std::string_view name = text(value, "action");
    for (auto action = trace_action::alloc; action <= trace_action::annotate;
         action = static_cast<trace_action>(static_cast<int>(action) + 1)) {
      if (name == to_string(action)) return action;
    }
    // An earlier name of it.
    if (name == "user_defined") return trace_action::annotate;
    refuse(value, fmt::format("the action {}, which a trace does not have", quote_option(name)));
  }

  annotation mark(const pickle_value& value) const {
    annotation mark;
    each_pair(value, "an annotation", [&](std::string_view key, const pickle_value& part) {
      if (key == "device") {
        mark.device = device(part);
      } else if (key == "time_us") {
        mark.time_us = signed_integer(part, key);
      } else {
        mark.values.emplace_back(key, as_text(part));
      }
    });
    return mark;
  }

  pickle_document document_;
  std::unordered_map<std::uint64_t, std::vector<stack_frame>> stacks_;  ///< by container
  std::vector<stack_frame> no_frames_;
};

}  // namespace

allocator_snapshot from_pickle(std::string_view bytes) {
  return snapshot_reader(bytes).read();
}

}  // namespace evmm
