// SPDX-License-Identifier: Apache-2.0
// What programs call: settings, statistics, snapshots.
#include "lib/torch/device_allocators.hpp"
#include "lib/torch/last_error.hpp"
#include "lib/torch/statistics_json.hpp"

#include <evmm/allocator/snapshot.hpp>
#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <system_error>

namespace {

using evmm::torch::device_allocator;
using evmm::torch::device_allocators;
using evmm::torch::guarded;

const char* text_of(const char* text, const char* what) {
  if (text == nullptr) throw evmm::invalid_argument(fmt::format("the {} is null", what));
  return text;
}

evmm::history_level level_of(std::string_view name) {
  using evmm::history_level;
  if (name == "off") return history_level::off;
  if (name == "state") return history_level::state;
  if (name == "alloc") return history_level::alloc;
  if (name == "all") return history_level::all;
  throw evmm::invalid_argument(fmt::format("the history level is '{}'", name),
                               "it takes off, state, alloc or all");
}

void append(evmm::allocator_snapshot& to, evmm::allocator_snapshot&& one) {
  const auto move_all = [](auto& into, auto& from) {
    into.insert(into.end(), std::make_move_iterator(from.begin()),
                std::make_move_iterator(from.end()));
  };
  move_all(to.segments, one.segments);
  move_all(to.external_annotations, one.external_annotations);
  if (to.device_traces.size() < one.device_traces.size()) {
    to.device_traces.resize(one.device_traces.size());
  }
  for (std::size_t device = 0; device < one.device_traces.size(); ++device) {
    move_all(to.device_traces[device], one.device_traces[device]);
  }
  if (to.settings.empty()) to.settings = std::move(one.settings);
}

void write_file(const char* path, const std::string& bytes) {
  errno = 0;
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  if (!file) {
    throw evmm::error(evmm::error_category::driver_error,
                      {.message = fmt::format("cannot write '{}': {}", path,
                                              std::generic_category().message(errno)),
                       .native_code = errno});
  }
}

}  // namespace

int evmm_torch_configure(const char* text) {
  return guarded([&] { device_allocators::all().configure(text_of(text, "configuration")); });
}

int evmm_torch_empty_cache(int device) {
  return guarded([&] { device_allocators::all().of(device).allocator.empty_cache(); });
}

int evmm_torch_statistics(int device, char* json, size_t bytes) {
  int length = 0;
  const int code = guarded([&] {
    if (json == nullptr && bytes > 0) throw evmm::invalid_argument("the buffer is null");
    const device_allocator& its = device_allocators::all().of(device);
    const std::string text = evmm::torch::statistics_json(
        its.allocator.statistics(), [&](evmm::pool_id pool) { return its.name_of(pool); });
    length = static_cast<int>(text.size());
    if (bytes == 0) return;
    const std::size_t written = std::min(text.size(), bytes - 1);
    std::memcpy(json, text.data(), written);
    json[written] = '\0';
  });
  return code == EVMM_TORCH_OK ? length : code;
}

int evmm_torch_reset_peaks(int device) {
  return guarded([&] { device_allocators::all().of(device).allocator.reset_peaks(); });
}

int evmm_torch_reset_totals(int device) {
  return guarded([&] { device_allocators::all().of(device).allocator.reset_totals(); });
}

int evmm_torch_snapshot(int device, const char* path) {
  return guarded([&] {
    text_of(path, "path");
    evmm::allocator_snapshot all;
    if (device == -1) {
      device_allocators::all().for_each_made(
          [&](device_allocator& one) { append(all, one.snapshot()); });
    } else {
      append(all, device_allocators::all().of(device).snapshot());
    }
    write_file(path, evmm::to_pickle(all));
  });
}

int evmm_torch_record_history(int device, const char* level, int stacks, size_t max_entries) {
  return guarded([&] {
    const evmm::history_options options{.level = level_of(text_of(level, "history level")),
                                        .stacks = stacks != 0,
                                        .max_entries = max_entries};
    if (device == -1) {
      device_allocators::all().record_history(options);
    } else {
      device_allocators::all().of(device).allocator.record_history(options);
    }
  });
}
