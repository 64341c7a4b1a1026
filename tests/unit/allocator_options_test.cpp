// SPDX-License-Identifier: Apache-2.0
#include "lib/allocator/options_grammar.hpp"

#include <evmm/allocator/options.hpp>
#include <evmm/error.hpp>
#include <evmm/units.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <string_view>
#include <vector>

namespace evmm {
namespace {

using namespace evmm::units;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// What parse_options says against `text`; fails the test when it takes it.
std::string refusal(std::string_view text, const allocator_options& base = {}) {
  try {
    parse_options(text, base);
  } catch (const invalid_argument& failure) {
    EXPECT_FALSE(failure.help().empty()) << text;
    return failure.what();
  }
  ADD_FAILURE() << "'" << text << "' was taken";
  return "";
}

std::string refusal(const allocator_options& options) {
  try {
    check(options);
  } catch (const invalid_argument& failure) {
    EXPECT_FALSE(failure.help().empty());
    return failure.what();
  }
  ADD_FAILURE() << "taken: " << to_string(options);
  return "";
}

// --- keys ---------------------------------------------------------------------------------------

TEST(allocator_options, nothing_changes_nothing) {
  EXPECT_EQ(parse_options(""), allocator_options{});
  EXPECT_EQ(parse_options(" \t\n"), allocator_options{});
  EXPECT_EQ(to_string(allocator_options{}), "");
  EXPECT_NO_THROW(check(allocator_options{}));
}

TEST(allocator_options, backend) {
  EXPECT_EQ(parse_options("backend:native").backend, allocator_backend::native);
  EXPECT_EQ(parse_options("backend:cudaMallocAsync").backend, allocator_backend::cuda_malloc_async);
  EXPECT_EQ(parse_options("backend:none").backend, allocator_backend::none);
  EXPECT_THAT(refusal("backend:jemalloc"),
              AllOf(HasSubstr("position 9"), HasSubstr("'jemalloc'"), HasSubstr("'backend'"),
                    HasSubstr("native, cudaMallocAsync or none")));
  EXPECT_THAT(refusal("backend:cudamallocasync"), HasSubstr("'cudamallocasync'"));
}

TEST(allocator_options, booleans_are_exactly_true_and_false) {
  struct boolean_key {
    const char* key;
    bool (*value)(const allocator_options&);
  };
  const boolean_key keys[] = {
      {"expandable_segments", [](const allocator_options& o) { return o.expandable_segments; }},
      {"release_lock_on_cudamalloc",
       [](const allocator_options& o) { return o.release_lock_on_device_alloc; }},
      {"release_lock_on_hipmalloc",
       [](const allocator_options& o) { return o.release_lock_on_device_alloc; }},
      {"throw_on_cudamalloc_oom", [](const allocator_options& o) { return o.throw_on_device_oom; }},
      {"graph_capture_record_stream_reuse",
       [](const allocator_options& o) { return o.graph_capture_record_stream_reuse; }},
      {"pinned_use_cuda_host_register",
       [](const allocator_options& o) { return o.pinned.use_host_register; }},
      {"pinned_use_hip_host_register",
       [](const allocator_options& o) { return o.pinned.use_host_register; }},
      {"pinned_use_background_threads",
       [](const allocator_options& o) { return o.pinned.background_thread; }},
      {"pinned_free_catch_all", [](const allocator_options& o) { return o.pinned.free_catch_all; }},
  };
  for (const auto& [key, value] : keys) {
    const std::string start = std::string(key) + ":";
    EXPECT_TRUE(value(parse_options(start + "True"))) << key;
    EXPECT_FALSE(value(parse_options(start + "False"))) << key;
    for (const char* bad : {"true", "FALSE", "1", "0", "yes", "Truee", "[True]"}) {
      EXPECT_THAT(refusal(start + bad), AllOf(HasSubstr(key), HasSubstr("True or False")));
    }
  }
}

TEST(allocator_options, sizes_in_megabytes) {
  EXPECT_EQ(parse_options("max_split_size_mb:20").max_split_size, 20_MiB);
  EXPECT_EQ(parse_options("max_split_size_mb:128").max_split_size, 128_MiB);
  EXPECT_EQ(parse_options("max_non_split_rounding_mb:40").max_non_split_rounding, 40_MiB);
  EXPECT_EQ(parse_options("large_segment_size_mb:11").large_segment, 11_MiB);
  EXPECT_EQ(parse_options("small_segment_size_mb:4").small_segment, 4_MiB);
  EXPECT_EQ(parse_options("min_large_size_mb:8").min_large, 8_MiB);
  EXPECT_EQ(parse_options("min_handle_size_mb:4").min_handle, 4_MiB);
  EXPECT_EQ(parse_options("max_handle_size_mb:128").max_handle, 128_MiB);
  EXPECT_EQ(parse_options("small_limit_kb:512").small_limit, 512_KiB);
  EXPECT_EQ(parse_options("min_block_size:256").min_block, 256u);
  EXPECT_EQ(parse_options("pinned_reserve_segment_size_mb:64").pinned.reserve_segment, 64_MiB);
  EXPECT_EQ(parse_options("pinned_max_round_threshold_mb:8").pinned.max_round_threshold, 8_MiB);
  EXPECT_EQ(parse_options("pinned_max_cached_size_mb:0").pinned.max_cached_size, 0u);
  EXPECT_EQ(parse_options("min_handle_size_mb:512K").min_handle, 512_KiB);
  EXPECT_EQ(parse_options("pinned_max_cached_size_mb:2G").pinned.max_cached_size, 2_GiB);
  for (const char* bad : {"", "x", "-1", "1.5", "20 MB", "0x10", "99999999999999999999",
                          "18446744073709551615", "[1]"}) {
    EXPECT_THAT(refusal("max_split_size_mb:" + std::string(bad)),
                AllOf(HasSubstr("position 19"), HasSubstr("max_split_size_mb")))
        << bad;
  }
  EXPECT_THAT(refusal("pinned_reserve_segment_size_mb:0"), HasSubstr("position 32"));
  EXPECT_THAT(refusal("max_split_size_mb:1099511627776"), HasSubstr("must be below"));
}

TEST(allocator_options, sizes_are_compared_with_each_other_in_any_order) {
  EXPECT_THAT(refusal("max_split_size_mb:19"),
              AllOf(HasSubstr("position 19"), HasSubstr("19.0 MiB"),
                    HasSubstr("large_segment_size_mb (20.0 MiB)")));
  EXPECT_THAT(refusal("max_non_split_rounding_mb:19"), HasSubstr("position 27"));
  EXPECT_EQ(parse_options("max_split_size_mb:12,large_segment_size_mb:12").max_split_size, 12_MiB);
  EXPECT_THAT(refusal("large_segment_size_mb:10"), HasSubstr("more than min_large_size_mb"));
  // The key that is in the string is the one that is pointed at.
  EXPECT_THAT(refusal("large_segment_size_mb:40", parse_options("max_split_size_mb:30")),
              AllOf(HasSubstr("position 23"), HasSubstr("max_split_size_mb is 30.0 MiB")));
  EXPECT_THAT(refusal("min_block_size:8"), HasSubstr("power of two"));
  EXPECT_THAT(refusal("min_block_size:768"), HasSubstr("power of two"));
  EXPECT_THAT(refusal("min_block_size:2M"), HasSubstr("small_limit_kb"));
  EXPECT_THAT(refusal("small_limit_kb:1000B"), HasSubstr("multiple of min_block_size"));
  EXPECT_THAT(refusal("small_segment_size_mb:0"), HasSubstr("small_limit_kb (1.0 MiB)"));
  EXPECT_THAT(refusal("min_large_size_mb:0"), HasSubstr("small_limit_kb (1.0 MiB)"));
  EXPECT_THAT(refusal("min_handle_size_mb:0"), HasSubstr("above 0"));
  EXPECT_THAT(refusal("max_handle_size_mb:1"), HasSubstr("power of two"));
  EXPECT_THAT(refusal("max_handle_size_mb:6"), HasSubstr("power of two"));
}

TEST(allocator_options, numbers) {
  EXPECT_EQ(parse_options("garbage_collection_threshold:0.8").garbage_collection_threshold, 0.8);
  for (const char* bad :
       {"0", "0.0", "1", "1.0", "-0.5", "2", "nan", "inf", "x", "0.5x", "[0.5]"}) {
    EXPECT_THAT(refusal("garbage_collection_threshold:" + std::string(bad)),
                AllOf(HasSubstr("position 30"), HasSubstr("above 0 and below 1")))
        << bad;
  }
  for (const double good : {0.0, 0.5, 1.0}) {
    const auto read = parse_options("per_process_memory_fraction:" + std::to_string(good));
    EXPECT_EQ(read.per_process_memory_fraction, good);
  }
  for (const char* bad : {"1.01", "-0.1", "nan", "x"}) {
    EXPECT_THAT(refusal("per_process_memory_fraction:" + std::string(bad)),
                AllOf(HasSubstr("position 29"), HasSubstr("from 0 to 1")));
  }
  EXPECT_EQ(parse_options("handle_fraction:64").handle_fraction, 64u);
  EXPECT_THAT(refusal("handle_fraction:0"), HasSubstr("at least 1"));
  EXPECT_THAT(refusal("handle_fraction:4294967296"), HasSubstr("position 17"));
  for (const unsigned good : {1u, 8u, 128u}) {
    const auto read = parse_options("pinned_num_register_threads:" + std::to_string(good));
    EXPECT_EQ(read.pinned.register_threads, good);
  }
  for (const char* bad : {"0", "3", "256", "-1", "x"}) {
    EXPECT_THAT(refusal("pinned_num_register_threads:" + std::string(bad)),
                AllOf(HasSubstr("position 29"), HasSubstr("128")));
  }
}

TEST(allocator_options, words) {
  EXPECT_EQ(parse_options("recycle_handles:never").recycle, recycling::never);
  EXPECT_EQ(parse_options("recycle_handles:ready").recycle, recycling::ready);
  EXPECT_EQ(parse_options("recycle_handles:wait").recycle, recycling::wait);
  EXPECT_THAT(refusal("recycle_handles:always"), HasSubstr("never, ready or wait"));
  EXPECT_EQ(parse_options("recycle_slack:0").recycle_slack, 0);
  EXPECT_EQ(parse_options("recycle_slack:0.1").recycle_slack, 0.1);
  EXPECT_THAT(refusal("recycle_slack:1.1"), HasSubstr("a number from 0 to 1"));
  EXPECT_EQ(parse_options("cross_stream_reuse:event").reuse, cross_stream_reuse::by_event);
  EXPECT_EQ(parse_options("cross_stream_reuse:wait").reuse, cross_stream_reuse::by_wait);
  EXPECT_THAT(refusal("cross_stream_reuse:by_event"), HasSubstr("event or wait"));
  EXPECT_EQ(parse_options("share:none").share, share_kind::none);
  EXPECT_EQ(parse_options("share:fd").share, share_kind::fd);
  EXPECT_EQ(parse_options("share:fabric").share, share_kind::fabric);
  EXPECT_THAT(refusal("share:nvlink"), HasSubstr("none, fd or fabric"));
}

TEST(allocator_options, peers_and_placements) {
  using policy = host_placement::policy;
  EXPECT_EQ(parse_options("peers:[1, 2]").peers, (std::vector{device_id{1}, device_id{2}}));
  EXPECT_TRUE(parse_options("peers:[]").peers.empty());
  for (const char* bad : {"1", "[-1]", "[x]", "[1:2]", "[1,1]"}) {
    EXPECT_THAT(refusal("peers:" + std::string(bad)), HasSubstr("a list of devices"));
  }
  for (const char* key : {"host_placement", "pinned_placement"}) {
    const auto read = [&](const std::string& text) {
      const auto options = parse_options(key + (":" + text));
      return *key == 'h' ? options.host : options.pinned.placement;
    };
    EXPECT_EQ(read("nearest"), host_placement{});
    EXPECT_EQ(read("interleave"), (host_placement{policy::interleave, {}}));
    EXPECT_EQ(read("[bind,1]"), (host_placement{policy::bind, {numa_node{1}}}));
    EXPECT_EQ(read("[interleave,0,1,0]"),
              (host_placement{policy::interleave, {numa_node{0}, numa_node{1}, numa_node{0}}}));
    for (const char* bad : {"bind", "[bind]", "[nearest,0]", "far", "[]", "[0,bind]", "[bind:0]",
                            "[bind,-1]", "[bind,0:1]"}) {
      EXPECT_THAT(refusal(key + (":" + std::string(bad))), HasSubstr("NUMA nodes")) << bad;
    }
  }
}

TEST(allocator_options, reservations) {
  const auto read = [](const std::string& text) {
    return parse_options("expandable_segments_reserve:" + text).expandable_segments_reserve;
  };
  EXPECT_EQ(read("0.5"), (reservation{0, 0.5}));
  EXPECT_EQ(read("2"), (reservation{0, 2}));
  EXPECT_EQ(read("40G"), (reservation{40_GiB, 1.125}));
  EXPECT_EQ(read("40g"), (reservation{40_GiB, 1.125}));
  EXPECT_EQ(read("1.5G"), (reservation{1536_MiB, 1.125}));
  EXPECT_EQ(read("512M"), (reservation{512_MiB, 1.125}));
  for (const char* bad : {"0", "0G", "-1", "-1G", "G", "nan", "inf", "infG", "1e30G", "x", "[0.5]",
                          "1GG", "40000000000"}) {
    EXPECT_THAT(refusal("expandable_segments_reserve:" + std::string(bad)),
                AllOf(HasSubstr("position 29"), HasSubstr("40G")))
        << bad;
  }
  const auto classes = parse_options(
      "expandable_segments_reserve:0.9,"
      "expandable_segments_reserve_by_class:[serving:0.25, ads_sparse:8G]");
  EXPECT_EQ(classes.expandable_segments_reserve, (reservation{0, 0.9}));
  EXPECT_EQ(
      classes.expandable_segments_reserve_by_class,
      (std::map<std::string, reservation>{{"serving", {0, 0.25}}, {"ads_sparse", {8_GiB, 1.125}}}));
  for (const char* bad : {"0.5", "[a]", "[a:0]", "[a:x]", "[a:1,a:2]", "[a:99999]"}) {
    EXPECT_THAT(refusal("expandable_segments_reserve_by_class:" + std::string(bad)),
                AllOf(HasSubstr("position"), HasSubstr("[name:0.25")))
        << bad;
  }
}

TEST(allocator_options, rounding_divisions_as_pytorch_reads_them) {
  using steps = std::vector<rounding_step>;
  const auto read = [](const std::string& text) {
    return parse_options("roundup_power2_divisions:" + text).roundup_power2_divisions;
  };
  EXPECT_EQ(read("4"), (steps{{0, 4}}));
  EXPECT_EQ(read("1"), (steps{{0, 1}}));
  EXPECT_EQ(read("[]"), steps{});
  EXPECT_EQ(read("[>:4]"), (steps{{0, 4}}));
  // The first entry fills back; each is for [boundary, 2 boundary).
  EXPECT_EQ(read("[64:8]"), (steps{{0, 8}, {128_MiB, 0}}));
  EXPECT_EQ(read("[64:8,128:2,256:2,512:2,1024:1,>:1]"), (steps{{0, 8}, {128_MiB, 2}, {1_GiB, 1}}));
  // What lies between entries stays off, and `>` starts at the last boundary.
  EXPECT_EQ(read("[64:8,256:4,>:1]"), (steps{{0, 8}, {128_MiB, 0}, {256_MiB, 1}}));
  EXPECT_EQ(read("[64:8,128:0,256:4,>:4]"), (steps{{0, 8}, {128_MiB, 0}, {256_MiB, 4}}));
  // The last of PyTorch's intervals is for all that is larger.
  EXPECT_EQ(read("[32768:2]"), (steps{{0, 2}}));
  EXPECT_EQ(read("[512K:8,1:4,>:4]"), (steps{{0, 8}, {1_MiB, 4}}));
  for (const char* bad : {"0", "3", "x", "-4", "[64]", "[64:3]", "[48:4]", "[0:4]", "[x:4]",
                          "[64:x]", "[128:4,64:2]", "[64:4,64:2]", "[>:1,64:4]", "[>:1,>:2]"}) {
    EXPECT_THAT(refusal("roundup_power2_divisions:" + std::string(bad)),
                AllOf(HasSubstr("position"), HasSubstr("powers of two")))
        << bad;
  }
  EXPECT_THAT(refusal("roundup_power2_divisions:[64:8,256:5]"), HasSubstr("position 36: '5'"));
}

// --- grammar ------------------------------------------------------------------------------------

TEST(allocator_options, white_space_is_ignored_everywhere) {
  const auto options = parse_options(" expandable_segments : Fal se ,\tmax_split_size_mb:\n1 28 ");
  EXPECT_FALSE(options.expandable_segments);
  EXPECT_EQ(options.max_split_size, 128_MiB);
}

TEST(allocator_options, errors_name_the_position) {
  struct bad_text {
    const char* text;
    const char* says;
  };
  const bad_text cases[] = {
      {"backend", "position 8: the end of the string where ':' after the key 'backend'"},
      {"backend:", "position 9: the end of the string where the value of 'backend'"},
      {"backend:native,", "position 16: the end of the string where a key"},
      {",backend:native", "position 1: ',' where a key"},
      {"backend:native,,peers:[]", "position 16: ',' where a key"},
      {"backend,native", "position 8: ',' where ':'"},
      {"backend::native", "position 9: ':' where the value"},
      {"backend:native:peers", "position 15: ':' where ','"},
      {"backend:native]", "position 15: ']' where ','"},
      {"[backend:native]", "position 1: '[' where a key"},
      {"peers:[1", "position 7: the list of 'peers' is not closed"},
      {"peers:[", "position 7: the list of 'peers' is not closed"},
      {"peers:[1,", "position 7: the list of 'peers' is not closed"},
      {"peers:[1:", "position 7: the list of 'peers' is not closed"},
      {"peers:[1:2", "position 7: the list of 'peers' is not closed"},
      {"peers:[1,]", "position 10: ']' where a member"},
      {"peers:[,1]", "position 8: ',' where a member"},
      {"peers:[[1]]", "position 8: '[' where a member"},
      {"peers:[1:2:3]", "position 11: ':' where ','"},
      {"peers:[1]2", "position 10: '2' where ','"},
      {" a : b", "position 2: 'a' is no key"},
      {"backend:native, backend:none", "position 17: 'backend' was given at position 1 already"},
      {"release_lock_on_cudamalloc:True,release_lock_on_hipmalloc:True", "at position 1 already"},
      {"expandable_segments:True;backend:native", "position 33: ':' where ','"},
      {"expandable_segments=True", "position 25: the end of the string where ':'"},
  };
  for (const auto& [text, says] : cases) EXPECT_THAT(refusal(text), HasSubstr(says)) << text;
}

TEST(allocator_options, unknown_keys_name_the_nearest) {
  EXPECT_THAT(refusal("max_split_sise_mb:128"),
              AllOf(HasSubstr("position 1: 'max_split_sise_mb' is no key"),
                    HasSubstr("did you mean 'max_split_size_mb'?")));
  EXPECT_THAT(refusal("backend:native,expandable_segment:True"),
              AllOf(HasSubstr("position 16"), HasSubstr("did you mean 'expandable_segments'?")));
  EXPECT_THAT(refusal("Backend:native"), HasSubstr("did you mean 'backend'?"));
  // PyTorch gave this one up.
  EXPECT_THAT(refusal("roundup_bypass_threshold_mb:64"), HasSubstr("is no key"));
  EXPECT_THAT(refusal(std::string(1000, 'x') + ":1"), HasSubstr("xxx...'"));
  EXPECT_THAT(refusal("\x01\xff:1"), HasSubstr("'\\x01\\xff'"));
}

TEST(allocator_options, edit_distances) {
  EXPECT_EQ(edit_distance("", ""), 0u);
  EXPECT_EQ(edit_distance("", "abc"), 3u);
  EXPECT_EQ(edit_distance("abc", ""), 3u);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3u);
  EXPECT_EQ(edit_distance("share", "shear"), 2u);
}

TEST(allocator_options, other_keys_keep_what_base_has) {
  allocator_options base;
  base.expandable_segments = false;
  base.pinned.register_threads = 4;
  const auto options = parse_options("pinned_num_register_threads:8", base);
  EXPECT_FALSE(options.expandable_segments);
  EXPECT_EQ(options.pinned.register_threads, 8u);
  EXPECT_EQ(parse_options("", base), base);
  EXPECT_EQ(
      parse_options("roundup_power2_divisions:[]", parse_options("roundup_power2_divisions:4")),
      allocator_options{});
}

// --- check --------------------------------------------------------------------------------------

TEST(allocator_options, check_refuses_what_no_string_could_say) {
  const auto with = [](auto change) {
    allocator_options options;
    change(options);
    return options;
  };
  EXPECT_THAT(refusal(with([](auto& o) {
                o.roundup_power2_divisions = {{1_MiB, 4}};
              })),
              AllOf(HasSubstr("roundup_power2_divisions"), Not(HasSubstr("position"))));
  EXPECT_THAT(refusal(with([](auto& o) {
                o.roundup_power2_divisions = {{0, 4}, {3_MiB, 2}};
              })),
              HasSubstr("powers of two"));
  EXPECT_THAT(refusal(with([](auto& o) {
                o.roundup_power2_divisions = {{0, 4}, {4_MiB, 2}, {2_MiB, 1}};
              })),
              HasSubstr("ascending"));
  EXPECT_THAT(refusal(with([](auto& o) {
                o.roundup_power2_divisions = {{0, 3}};
              })),
              HasSubstr("3 divisions"));
  EXPECT_THAT(refusal(with([](auto& o) { o.expandable_segments_reserve.fraction = -1; })),
              HasSubstr("expandable_segments_reserve is -1"));
  EXPECT_THAT(refusal(with([](auto& o) { o.expandable_segments_reserve_by_class["a b"] = {}; })),
              HasSubstr("'a b'"));
  EXPECT_THAT(refusal(with([](auto& o) { o.expandable_segments_reserve_by_class[""] = {}; })),
              HasSubstr("not empty"));
  EXPECT_THAT(refusal(with([](auto& o) { o.peers = {device_id{-1}}; })), HasSubstr("device -1"));
  EXPECT_THAT(refusal(with([](auto& o) { o.host.nodes = {numa_node{0}}; })), HasSubstr("nearest"));
  EXPECT_THAT(refusal(with([](auto& o) {
                o.per_process_memory_fraction = std::numeric_limits<double>::quiet_NaN();
              })),
              HasSubstr("per_process_memory_fraction"));
  EXPECT_THAT(refusal(with([](auto& o) {
                o.garbage_collection_threshold = std::numeric_limits<double>::quiet_NaN();
              })),
              HasSubstr("garbage_collection_threshold"));
  EXPECT_THAT(refusal(with([](auto& o) {
                o.expandable_segments_reserve.bytes = std::numeric_limits<std::size_t>::max();
              })),
              HasSubstr("must be below"));
}

}  // namespace
}  // namespace evmm
