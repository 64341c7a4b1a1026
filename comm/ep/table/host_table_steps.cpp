// SPDX-License-Identifier: Apache-2.0
// The steps as host functions, for the host driver: what the kernels do side by side, written to be
// read.
#include "comm/ep/table/hot_rows.hpp"
#include "comm/ep/table/table_steps.hpp"

#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

namespace evmm::ep {

namespace {

/// A row to load, and the place in `out` that asked for it.
struct wanted_row {
  std::uint32_t key = 0;
  std::uint32_t place = 0;
};

class host_table_steps final : public table_steps {
 public:
  explicit host_table_steps(driver& on) : on_(on) {}

  std::size_t scratch_bytes() const override { return 0; }
  void gather(const table_shape& shape, const gather_batch& batch, std::byte*,
              native_stream stream) override {
    on_.launch(stream, [=] { run_gather(shape, batch); });
  }
  void scatter(const table_shape& shape, const std::int64_t* indices, std::uint64_t count,
               const char* rows, native_stream stream) override {
    on_.launch(stream, [=] { run_scatter(shape, indices, count, rows); });
  }
  void drop(const table_shape& shape, caches_of whose, std::uint64_t first, std::uint64_t count,
            native_stream stream) override {
    on_.launch(stream, [=] {
      for (int r = 0; r < shape.view.ranks; ++r) {
        if (whose == caches_of::this_rank && r != shape.view.rank) continue;
        for (std::uint64_t slot = 0; slot < std::uint64_t{shape.sets} * k_ways; ++slot) {
          drop_slot(shape, r, slot, first, count);
        }
      }
    });
  }

 private:
  static bool exists(const table_shape& shape, std::int64_t index, std::uint64_t place) {
    if (index >= 0 && static_cast<std::uint64_t>(index) < shape.view.rows) return true;
    if (index != -1 && shape.counts->wrong_place == 0) {
      shape.counts->wrong_place = place + 1;
      shape.counts->wrong_index = index;
    }
    return false;
  }

  static void run_gather(const table_shape& shape, const gather_batch& batch) {
    const std::size_t bytes = shape.view.row_bytes;
    const auto out = [&](std::uint32_t place) { return batch.out + place * bytes; };
    table_counts& counts = *shape.counts;
    counts.gathered += batch.count;
    const auto round = static_cast<std::uint32_t>(++counts.rounds);

    std::vector<wanted_row> wanted;
    for (std::uint32_t place = 0; place < batch.count; ++place) {
      const std::int64_t index = batch.indices[place];
      if (!exists(shape, index, batch.place + place)) continue;
      const auto row = static_cast<std::uint32_t>(index);
      const std::uint32_t slot = shape.sets == 0 ? k_no_row : find_copy(shape, row, round);
      if (slot == k_no_row) {
        wanted.push_back({shape.key_of(row), place});
        continue;
      }
      std::memcpy(out(place), shape.copy_of(slot), bytes);
      ++counts.hits;
    }
    if (batch.sorted_by.any()) {
      std::stable_sort(wanted.begin(), wanted.end(),
                       [low = batch.sorted_by.first](const wanted_row& a, const wanted_row& b) {
                         return a.key >> low < b.key >> low;
                       });
    }
    for (std::size_t begin = 0; begin < wanted.size(); begin += k_chunk) {
      const auto chunk =
          std::span{wanted}.subspan(begin, std::min<std::size_t>(k_chunk, wanted.size() - begin));
      for (const wanted_row& one : chunk) {
        const auto same = std::find_if(chunk.begin(), chunk.end(), [&](const wanted_row& other) {
          return other.key == one.key;
        });
        if (same->place != one.place) {
          std::memcpy(out(one.place), out(same->place), bytes);
          continue;
        }
        const auto row = static_cast<std::uint32_t>(shape.row_of(one.key));
        std::memcpy(out(one.place), shape.view.row(row), bytes);
        ++counts.fetched;
        const std::uint32_t slot = shape.sets == 0 ? k_no_row : claim_copy(shape, row, round);
        if (slot != k_no_row) std::memcpy(shape.copy_of(slot), out(one.place), bytes);
      }
    }
  }

  static void run_scatter(const table_shape& shape, const std::int64_t* indices,
                          std::uint64_t count, const char* rows) {
    const std::size_t bytes = shape.view.row_bytes;
    for (std::uint64_t i = 0; i < count; ++i) {
      if (!exists(shape, indices[i], i)) continue;
      const auto row = static_cast<std::uint32_t>(indices[i]);
      std::memcpy(shape.view.row(row), rows + i * bytes, bytes);
      for (int r = 0; shape.sets > 0 && r < shape.view.ranks; ++r) drop_copies(shape, r, row);
    }
  }

  driver& on_;
};

}  // namespace

std::unique_ptr<table_steps> make_host_table_steps(driver& on) {
  return std::make_unique<host_table_steps>(on);
}

}  // namespace evmm::ep
