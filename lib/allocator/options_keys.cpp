// SPDX-License-Identifier: Apache-2.0
#include "lib/allocator/options_keys.hpp"

#include <evmm/units.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>
#include <iterator>

namespace evmm {

namespace {

using namespace evmm::units;
using options = allocator_options;
using value = option_value;

constexpr std::string_view k_truth = "True or False";
constexpr std::string_view k_megabytes = "a size in MiB (or 512K, 2G)";

std::string write_optional(const std::optional<std::size_t>& size) {
  return size ? write_size(*size, 1_MiB) : "";
}

template <class Enum>
std::string write_name(Enum of, std::initializer_list<const char*> names) {
  const auto index = static_cast<std::size_t>(of);
  return index < names.size() ? names.begin()[index] : "";
}

// clang-format off: one key a paragraph reads best.
constexpr option_key k_keys[] = {
    {"backend", "native, cudaMallocAsync or none",
     [](options& o, const value& v) {
       o.backend = static_cast<allocator_backend>(v.one_of({"native", "cudaMallocAsync", "none"}));
     },
     [](const options& o) {
       return write_name(o.backend, {"native", "cudaMallocAsync", "none"});
     }},

    {"min_block_size", "a size in bytes, a power of two of at least 16",
     [](options& o, const value& v) { o.min_block = v.size(1); },
     [](const options& o) { return write_size(o.min_block, 1); }},
    {"small_limit_kb", "a size in KiB",
     [](options& o, const value& v) { o.small_limit = v.size(1_KiB); },
     [](const options& o) { return write_size(o.small_limit, 1_KiB); }},
    {"small_segment_size_mb", k_megabytes,
     [](options& o, const value& v) { o.small_segment = v.size(1_MiB); },
     [](const options& o) { return write_size(o.small_segment, 1_MiB); }},
    {"large_segment_size_mb", "a size in MiB, more than min_large_size_mb (10)",
     [](options& o, const value& v) { o.large_segment = v.size(1_MiB); },
     [](const options& o) { return write_size(o.large_segment, 1_MiB); }},
    {"min_large_size_mb", k_megabytes,
     [](options& o, const value& v) { o.min_large = v.size(1_MiB); },
     [](const options& o) { return write_size(o.min_large, 1_MiB); }},
    {"roundup_power2_divisions",
     "a power of two, or a list as [64:8,256:4,>:1] of ascending powers of two in MiB, `>` last, "
     "each with 0 or a power of two",
     [](options& o, const value& v) { o.roundup_power2_divisions = v.rounding(); },
     [](const options& o) { return write_rounding(o.roundup_power2_divisions); }},
    {"max_split_size_mb", "a size in MiB of at least large_segment_size_mb",
     [](options& o, const value& v) { o.max_split_size = v.size(1_MiB); },
     [](const options& o) { return write_optional(o.max_split_size); }},
    {"max_non_split_rounding_mb", "a size in MiB of at least large_segment_size_mb",
     [](options& o, const value& v) { o.max_non_split_rounding = v.size(1_MiB); },
     [](const options& o) { return write_optional(o.max_non_split_rounding); }},

    {"garbage_collection_threshold", "a number above 0 and below 1",
     [](options& o, const value& v) { o.garbage_collection_threshold = v.number_above(0); },
     [](const options& o) { return write_number(o.garbage_collection_threshold); }},
    {"per_process_memory_fraction", "a number from 0 to 1",
     [](options& o, const value& v) { o.per_process_memory_fraction = v.number(); },
     [](const options& o) { return write_number(o.per_process_memory_fraction); }},
    {"throw_on_cudamalloc_oom", k_truth,
     [](options& o, const value& v) { o.throw_on_device_oom = v.truth(); },
     [](const options& o) { return write_truth(o.throw_on_device_oom); }},
    {"release_lock_on_cudamalloc", k_truth,
     [](options& o, const value& v) { o.release_lock_on_device_alloc = v.truth(); },
     [](const options& o) { return write_truth(o.release_lock_on_device_alloc); }},

    {"expandable_segments", k_truth,
     [](options& o, const value& v) { o.expandable_segments = v.truth(); },
     [](const options& o) { return write_truth(o.expandable_segments); }},
    {"expandable_segments_reserve",
     "a fraction of the device's memory (0.5) or a size with its unit (40G)",
     [](options& o, const value& v) { o.expandable_segments_reserve = v.reserve(); },
     [](const options& o) { return write_reserve(o.expandable_segments_reserve); }},
    {"expandable_segments_reserve_by_class", "a list as [name:0.25,other:8G], each name once",
     [](options& o, const value& v) {
       o.expandable_segments_reserve_by_class = v.reserve_by_class();
     },
     [](const options& o) {
       return write_reserve_by_class(o.expandable_segments_reserve_by_class);
     }},
    {"recycle_handles", "never, ready or wait",
     [](options& o, const value& v) {
       o.recycle = static_cast<recycling>(v.one_of({"never", "ready", "wait"}));
     },
     [](const options& o) {
       return write_name(o.recycle, {"never", "ready", "wait"});
     }},
    {"recycle_slack", "a number from 0 to 1",
     [](options& o, const value& v) { o.recycle_slack = v.number(); },
     [](const options& o) { return write_number(o.recycle_slack); }},
    {"min_handle_size_mb", k_megabytes,
     [](options& o, const value& v) { o.min_handle = v.size(1_MiB); },
     [](const options& o) { return write_size(o.min_handle, 1_MiB); }},
    {"max_handle_size_mb", "a size in MiB, min_handle_size_mb times a power of two",
     [](options& o, const value& v) { o.max_handle = v.size(1_MiB); },
     [](const options& o) { return write_size(o.max_handle, 1_MiB); }},
    {"handle_fraction", "a whole number of at least 1",
     [](options& o, const value& v) { o.handle_fraction = v.count(); },
     [](const options& o) { return fmt::format("{}", o.handle_fraction); }},

    {"cross_stream_reuse", "event or wait",
     [](options& o, const value& v) {
       o.reuse = static_cast<cross_stream_reuse>(v.one_of({"event", "wait"}));
     },
     [](const options& o) {
       return write_name(o.reuse, {"event", "wait"});
     }},
    {"graph_capture_record_stream_reuse", k_truth,
     [](options& o, const value& v) { o.graph_capture_record_stream_reuse = v.truth(); },
     [](const options& o) { return write_truth(o.graph_capture_record_stream_reuse); }},

    {"share", "none, fd or fabric",
     [](options& o, const value& v) {
       o.share = static_cast<share_kind>(v.one_of({"none", "fd", "fabric"}));
     },
     [](const options& o) {
       return write_name(o.share, {"none", "fd", "fabric"});
     }},
    {"peers", "a list of devices as [1,2], each once",
     [](options& o, const value& v) { o.peers = v.devices(); },
     [](const options& o) { return write_devices(o.peers); }},
    {"host_placement",
     "nearest, interleave, or a list of NUMA nodes as [bind,0] or [interleave,0,1]",
     [](options& o, const value& v) { o.host = v.placement(); },
     [](const options& o) { return write_placement(o.host); }},

    {"pinned_use_cuda_host_register", k_truth,
     [](options& o, const value& v) { o.pinned.use_host_register = v.truth(); },
     [](const options& o) { return write_truth(o.pinned.use_host_register); }},
    {"pinned_num_register_threads", "a power of two up to 128",
     [](options& o, const value& v) { o.pinned.register_threads = v.count(); },
     [](const options& o) { return fmt::format("{}", o.pinned.register_threads); }},
    {"pinned_use_background_threads", k_truth,
     [](options& o, const value& v) { o.pinned.background_thread = v.truth(); },
     [](const options& o) { return write_truth(o.pinned.background_thread); }},
    {"pinned_reserve_segment_size_mb", "a size in MiB above 0",
     [](options& o, const value& v) { o.pinned.reserve_segment = v.size_above_0(1_MiB); },
     [](const options& o) { return write_size(o.pinned.reserve_segment, 1_MiB); }},
    {"pinned_max_round_threshold_mb", k_megabytes,
     [](options& o, const value& v) { o.pinned.max_round_threshold = v.size(1_MiB); },
     [](const options& o) { return write_size(o.pinned.max_round_threshold, 1_MiB); }},
    {"pinned_max_cached_size_mb", k_megabytes,
     [](options& o, const value& v) { o.pinned.max_cached_size = v.size(1_MiB); },
     [](const options& o) { return write_optional(o.pinned.max_cached_size); }},
    {"pinned_free_catch_all", k_truth,
     [](options& o, const value& v) { o.pinned.free_catch_all = v.truth(); },
     [](const options& o) { return write_truth(o.pinned.free_catch_all); }},
    {"pinned_placement",
     "nearest, interleave, or a list of NUMA nodes as [bind,0] or [interleave,0,1]",
     [](options& o, const value& v) { o.pinned.placement = v.placement(); },
     [](const options& o) { return write_placement(o.pinned.placement); }},
};
// clang-format on

}  // namespace

std::span<const option_key> option_keys() {
  return k_keys;
}

const option_key* find_option_key(std::string_view name) {
  if (name == "release_lock_on_hipmalloc") name = "release_lock_on_cudamalloc";
  if (name == "pinned_use_hip_host_register") name = "pinned_use_cuda_host_register";
  const auto* const found = std::find_if(std::begin(k_keys), std::end(k_keys),
                                         [&](const option_key& key) { return key.name == name; });
  return found == std::end(k_keys) ? nullptr : found;
}

}  // namespace evmm
