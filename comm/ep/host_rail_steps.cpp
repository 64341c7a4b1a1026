// SPDX-License-Identifier: Apache-2.0
#include "comm/ep/bf16.hpp"
#include "comm/ep/fp8.hpp"
#include "comm/ep/host_rows.hpp"
#include "comm/ep/rail_steps.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

namespace evmm::ep {

namespace {

/// The node of an expert; -1 for an id that is none.
int node_of(const node_map& map, std::int64_t expert) {
  if (expert < 0 || expert >= map.experts) return -1;
  return map.node_of[expert / map.experts_a_rank];
}

std::int64_t id_here(const node_map& map, std::int64_t expert) {
  // An id that there is not stays one, for the dispatch within the node to tell.
  if (expert >= map.experts) return expert;
  if (node_of(map, expert) != map.node) return -1;
  return map.index_in[expert / map.experts_a_rank] * map.experts_a_rank +
         expert % map.experts_a_rank;
}

/// One token, wherever it lies.
struct token {
  const char* x;
  const float* scales;
  const std::int64_t* ids;
  const float* weights;  ///< null for all 1
};

token token_of(const token_arrays& all, const token_record& record, int t) {
  const auto at = static_cast<std::size_t>(t);
  const std::size_t choice = at * static_cast<std::size_t>(record.top_k);
  return {.x = all.x + at * record.row_bytes,
          .scales = all.scales + at * static_cast<std::size_t>(record.scale_count),
          .ids = all.ids + choice,
          .weights = all.weights == nullptr ? nullptr : all.weights + choice};
}

/// The ids of one of many.
template <class Id>
Id* ids_of(Id* all, int row, int top_k) {
  return all + static_cast<std::ptrdiff_t>(row) * top_k;
}

std::int64_t* ids_in(const token_record& record, char* at) {
  return reinterpret_cast<std::int64_t*>(at + record.ids_at());
}

token token_in(const token_record& record, char* at) {
  return {.x = at,
          .scales = reinterpret_cast<const float*>(at + record.scales_at()),
          .ids = ids_in(record, at),
          .weights = reinterpret_cast<const float*>(at + record.weights_at())};
}

void write_record(const token_record& record, const token& from, char* at) {
  std::memcpy(at, from.x, record.row_bytes);
  std::copy_n(from.ids, record.top_k, ids_in(record, at));
  std::copy_n(from.scales, record.scale_count, reinterpret_cast<float*>(at + record.scales_at()));
  auto* const weights = reinterpret_cast<float*>(at + record.weights_at());
  for (int k = 0; k < record.top_k; ++k) weights[k] = from.weights == nullptr ? 1 : from.weights[k];
}

/// Makes a token the batch's at index `row`, where its own row may lie already.
void join(const node_map& map, const token_record& record, const token& from, const token_batch& to,
          int row) {
  const token_batch at = to.from(static_cast<std::size_t>(row), record);
  if (from.x != at.x) {
    std::memcpy(at.x, from.x, record.row_bytes);
    std::copy_n(from.scales, record.scale_count, at.scales);
  }
  for (int k = 0; k < record.top_k; ++k) {
    at.ids[k] = id_here(map, from.ids[k]);
    at.weights[k] = from.weights == nullptr ? 1 : from.weights[k];
  }
}

class host_rail_steps final : public rail_steps {
 public:
  explicit host_rail_steps(driver& on) : on_(on) {}

  void place(const node_map& map, const token_arrays& from, int top_k, std::int32_t* places,
             std::int64_t* counts, native_stream stream) override {
    on_.launch(stream, [=] {
      std::fill_n(counts, map.nodes, 0);
      for (int t = 0; t < from.count; ++t) {
        std::int32_t* const mine = places + t * map.nodes;
        std::fill_n(mine, map.nodes, -1);
        for (int k = 0; k < top_k; ++k) {
          const int node = node_of(map, from.ids[t * top_k + k]);
          if (node < 0 || node == map.node || mine[node] >= 0) continue;
          mine[node] = static_cast<std::int32_t>(counts[node]++);
        }
      }
    });
  }

  void quantize(const token_arrays& from, int hidden, const token_batch& to,
                native_stream stream) override {
    on_.launch(stream, [=] {
      const auto row = static_cast<std::size_t>(hidden);
      const std::size_t scales = row / k_scale_elements;
      for (std::size_t t = 0; t < static_cast<std::size_t>(from.count); ++t) {
        quantize_row(from.x + t * row * sizeof(bf16), to.x + t * row,
                     {to.scales + t * scales, scales});
      }
    });
  }

  void pack(const node_map& map, const token_arrays& from, const std::int32_t* places,
            const record_blocks& to, const token_batch& own, native_stream stream) override {
    on_.launch(stream, [=] {
      for (int t = 0; t < from.count; ++t) {
        join(map, to.record, token_of(from, to.record, t), own, t);
        for (int node = 0; node < map.nodes; ++node) {
          const int place = places[t * map.nodes + node];
          if (place >= 0) write_record(to.record, token_of(from, to.record, t), to.of(node, place));
        }
      }
    });
  }

  void unpack(const node_map& map, const record_blocks& came, const batch_counts& counts,
              const token_batch& to, native_stream stream) override {
    on_.launch(stream, [=] {
      int row = counts.own;
      for (int node = 0; node < map.nodes; ++node) {
        for (int i = 0; i < counts.came[node]; ++i, ++row) {
          join(map, came.record, token_in(came.record, came.of(node, i)), to, row);
        }
      }
    });
  }

  void pack_in_place(const node_map& map, const token_arrays& from, std::int32_t* places,
                     const record_blocks& to, const token_batch& own,
                     native_stream stream) override {
    on_.launch(stream, [=] {
      const int top_k = to.record.top_k;
      for (int t = 0; t < to.max_tokens; ++t) {
        const bool there = t < from.count;
        if (there) {
          join(map, to.record, token_of(from, to.record, t), own, t);
        } else {
          std::fill_n(ids_of(own.ids, t, top_k), top_k, -1);
        }
        for (int node = 0; node < map.nodes; ++node) {
          if (node == map.node) continue;
          const auto has_experts_there = [&] {
            const std::int64_t* const ids = ids_of(from.ids, t, top_k);
            return std::any_of(ids, ids + top_k,
                               [&](std::int64_t id) { return node_of(map, id) == node; });
          };
          const bool goes = there && has_experts_there();
          if (there) places[t * map.nodes + node] = goes ? t : -1;
          if (goes) {
            write_record(to.record, token_of(from, to.record, t), to.of(node, t));
          } else {
            std::fill_n(ids_in(to.record, to.of(node, t)), top_k, -1);
          }
        }
      }
    });
  }

  void unpack_in_place(const node_map& map, const record_blocks& came, const token_batch& to,
                       native_stream stream) override {
    on_.launch(stream, [=] {
      const int top_k = came.record.top_k;
      for (int node = 0; node < map.nodes; ++node) {
        if (node == map.node) continue;
        for (int i = 0; i < came.max_tokens; ++i) {
          char* const at = came.of(node, i);
          std::int64_t* const ids = ids_in(came.record, at);
          const int row = node * came.max_tokens + i;
          if (std::any_of(ids, ids + top_k, [](std::int64_t id) { return id >= 0; })) {
            join(map, came.record, token_in(came.record, at), to, row);
          } else {
            std::fill_n(ids_of(to.ids, row, top_k), top_k, -1);
          }
          std::fill_n(ids, top_k, -1);
        }
      }
    });
  }

  void add(const node_map& map, int count, const std::int32_t* places, int max_tokens, int hidden,
           int top_k, const combine_output& own, const combine_output& returned,
           const combine_output& to, native_stream stream) override {
    on_.launch(stream, [=] {
      const auto row_of = [&](int node, int t) {
        const int place = places[t * map.nodes + node];
        return static_cast<std::size_t>(node) * static_cast<std::size_t>(max_tokens) +
               static_cast<std::size_t>(place);
      };
      const auto comes = [&](int node, int t) { return places[t * map.nodes + node] >= 0; };
      const auto width = static_cast<std::size_t>(hidden);
      std::vector<float> sum(width);
      for (int t = 0; t < count; ++t) {
        const auto begin = static_cast<std::size_t>(t) * width;
        for (std::size_t i = 0; i < width; ++i) {
          sum[i] = to.bias == nullptr ? 0 : to_float(static_cast<const bf16*>(to.bias)[begin + i]);
        }
        for (int node = 0; node < map.nodes; ++node) {
          if (node != map.node && !comes(node, t)) continue;
          const bf16* const part =
              node == map.node ? static_cast<const bf16*>(own.sums) + begin
                               : static_cast<const bf16*>(returned.sums) + row_of(node, t) * width;
          for (std::size_t i = 0; i < width; ++i) sum[i] += to_float(part[i]);
        }
        for (std::size_t i = 0; i < width; ++i) {
          static_cast<bf16*>(to.sums)[begin + i] = to_bf16(sum[i]);
        }
        for (int k = 0; k < top_k && to.weight_gradients != nullptr; ++k) {
          const auto each = static_cast<std::size_t>(top_k);
          float gradient = own.weight_gradients[t * top_k + k];
          for (int node = 0; node < map.nodes; ++node) {
            if (node == map.node || !comes(node, t)) continue;
            gradient +=
                returned.weight_gradients[row_of(node, t) * each + static_cast<std::size_t>(k)];
          }
          to.weight_gradients[t * top_k + k] = gradient;
        }
      }
    });
  }

 private:
  driver& on_;
};

}  // namespace

std::unique_ptr<rail_steps> make_host_rail_steps(driver& on) {
  return std::make_unique<host_rail_steps>(on);
}

}  // namespace evmm::ep
