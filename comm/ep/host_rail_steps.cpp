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
            const record_blocks& to, native_stream stream) override {
    on_.launch(stream, [=] {
      const token_record& record = to.record;
      const auto scales = static_cast<std::size_t>(record.scale_count);
      const auto top_k = static_cast<std::size_t>(record.top_k);
      for (int t = 0; t < from.count; ++t) {
        const auto token = static_cast<std::size_t>(t);
        for (int node = 0; node < map.nodes; ++node) {
          if (places[t * map.nodes + node] < 0) continue;
          char* const at = to.of(node, places[t * map.nodes + node]);
          std::memcpy(at, from.x + token * record.row_bytes, record.row_bytes);
          std::memcpy(at + record.ids_at(), from.ids + token * top_k, top_k * sizeof(std::int64_t));
          if (scales > 0) {
            std::memcpy(at + record.scales_at(), from.scales + token * scales,
                        scales * sizeof(float));
          }
          auto* const weights = reinterpret_cast<float*>(at + record.weights_at());
          for (std::size_t k = 0; k < top_k; ++k) {
            weights[k] = from.weights == nullptr ? 1 : from.weights[token * top_k + k];
          }
        }
      }
    });
  }

  void unpack(const node_map& map, const token_arrays& from, const record_blocks& came,
              const batch_counts& counts, const token_batch& to, native_stream stream) override {
    on_.launch(stream, [=] {
      const token_record& record = came.record;
      const auto scales = static_cast<std::size_t>(record.scale_count);
      const auto top_k = static_cast<std::size_t>(record.top_k);
      const auto add = [&](std::size_t row, const char* x, const float* row_scales,
                           const std::int64_t* ids, const float* weights) {
        if (x != to.x + row * record.row_bytes) {
          std::memcpy(to.x + row * record.row_bytes, x, record.row_bytes);
          std::copy_n(row_scales, scales, to.scales + row * scales);
        }
        for (std::size_t k = 0; k < top_k; ++k) {
          to.ids[row * top_k + k] = id_here(map, ids[k]);
          to.weights[row * top_k + k] = weights == nullptr ? 1 : weights[k];
        }
      };
      std::size_t row = 0;
      for (; row < static_cast<std::size_t>(counts.own); ++row) {
        add(row, from.x + row * record.row_bytes, from.scales + row * scales,
            from.ids + row * top_k, from.weights == nullptr ? nullptr : from.weights + row * top_k);
      }
      for (int node = 0; node < map.nodes; ++node) {
        for (int i = 0; i < counts.came[node]; ++i, ++row) {
          const char* const at = came.of(node, i);
          add(row, at, reinterpret_cast<const float*>(at + record.scales_at()),
              reinterpret_cast<const std::int64_t*>(at + record.ids_at()),
              reinterpret_cast<const float*>(at + record.weights_at()));
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
