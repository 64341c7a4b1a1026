// SPDX-License-Identifier: Apache-2.0
// Options as text and back, and from the environment.
#include "lib/allocator/options_grammar.hpp"

#include <evmm/allocator/options.hpp>
#include <evmm/error.hpp>
#include <evmm/units.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace evmm {
namespace {

using namespace evmm::units;
using ::testing::AllOf;
using ::testing::HasSubstr;

// --- there and back -----------------------------------------------------------------------------

TEST(allocator_options, text_says_only_what_differs) {
  EXPECT_EQ(to_string(parse_options("backend:native,expandable_segments:True")), "");
  EXPECT_EQ(to_string(parse_options("max_split_size_mb:128, expandable_segments:False")),
            "max_split_size_mb:128,expandable_segments:False");
  EXPECT_EQ(to_string(parse_options("roundup_power2_divisions:[64:8,256:4,>:1]")),
            "roundup_power2_divisions:[64:8,128:0,256:1,>:1]");
  EXPECT_EQ(to_string(parse_options("expandable_segments_reserve:1.5G")),
            "expandable_segments_reserve:1536M");
}

class random_options {
 public:
  explicit random_options(unsigned seed) : random_(seed) {}

  allocator_options next() {
    allocator_options o;
    o.backend = static_cast<allocator_backend>(below(3));
    if (coin()) o.min_block = std::size_t{16} << below(8);
    if (coin()) o.small_limit = o.min_block * (1 + below(1000));
    o.small_segment = o.small_limit + o.min_block * below(4000);
    if (coin()) o.min_large = o.small_limit + below(1 << 24);
    o.large_segment = (o.min_large / o.min_block + 1 + below(5000)) * o.min_block;
    if (coin()) o.roundup_power2_divisions = rounding();
    if (coin()) o.max_split_size = o.large_segment + below(1 << 30);
    if (coin()) o.max_non_split_rounding = o.large_segment + below(100) * 1_MiB;
    if (coin()) o.garbage_collection_threshold = fraction();
    if (coin()) o.per_process_memory_fraction = fraction();
    o.throw_on_device_oom = coin();
    o.release_lock_on_device_alloc = coin();
    o.expandable_segments = coin();
    if (coin()) o.expandable_segments_reserve = reserve();
    while (coin()) {
      o.expandable_segments_reserve_by_class["class_" + std::to_string(below(10))] = reserve();
    }
    o.recycle = static_cast<recycling>(below(3));
    if (coin()) o.recycle_slack = fraction();
    if (coin()) o.min_handle = (1 + below(64)) * 64_KiB;
    o.max_handle = o.min_handle << below(8);
    if (coin()) o.handle_fraction = 1 + static_cast<unsigned>(below(1000));
    o.reuse = static_cast<cross_stream_reuse>(below(2));
    o.graph_capture_record_stream_reuse = coin();
    o.share = static_cast<share_kind>(below(3));
    std::set<int> peers;
    while (coin()) peers.insert(static_cast<int>(below(16)));
    for (const int peer : peers) o.peers.push_back(device_id{peer});
    o.host = placement();
    o.pinned.use_host_register = coin();
    o.pinned.register_threads = 1u << below(8);
    o.pinned.background_thread = coin();
    if (coin()) o.pinned.reserve_segment = 1 + below(1 << 30);
    if (coin()) o.pinned.max_round_threshold = below(1 << 30);
    if (coin()) o.pinned.max_cached_size = below(1 << 30);
    o.pinned.free_catch_all = coin();
    o.pinned.placement = placement();
    return o;
  }

  std::size_t below(std::size_t end) {
    return std::uniform_int_distribution<std::size_t>(0, end - 1)(random_);
  }
  bool coin() { return below(2) == 0; }

 private:
  double fraction() { return std::uniform_real_distribution<double>(1e-9, 1)(random_); }

  reservation reserve() {
    if (coin()) return {.bytes = 0, .fraction = fraction()};
    return {.bytes = (1 + below(1000)) << (10 * below(5))};
  }

  std::vector<rounding_step> rounding() {
    std::vector<rounding_step> steps;
    std::size_t from = 0;
    do {
      unsigned divisions = 0;
      do {
        divisions = below(8) == 0 ? 0 : 1u << below(6);
      } while (!steps.empty() && divisions == steps.back().divisions);
      steps.push_back({from, divisions});
      from = from == 0 ? std::size_t{2} << below(30) : from << (1 + below(4));
    } while (steps.size() < 6 && coin());
    return steps;
  }

  host_placement placement() {
    host_placement result;
    result.how = static_cast<host_placement::policy>(below(3));
    if (result.how == host_placement::policy::nearest) return result;
    if (result.how == host_placement::policy::bind) result.nodes.push_back(numa_node{0});
    while (coin()) result.nodes.push_back(numa_node{static_cast<int>(below(8))});
    return result;
  }

  std::mt19937 random_;
};

TEST(allocator_options, any_options_come_back_from_their_text) {
  random_options random(20260101);
  for (int i = 0; i < 2000; ++i) {
    const allocator_options options = random.next();
    ASSERT_NO_THROW(check(options)) << to_string(options);
    const std::string text = to_string(options);
    ASSERT_EQ(parse_options(text), options) << text;
    ASSERT_EQ(to_string(parse_options(text)), text);
  }
}

TEST(allocator_options, any_text_is_taken_or_refused) {
  random_options random(7);
  const std::string letters = ",:[]>. \t0123456789kKGMTBeE-+xTrueFalse\x01\xff";
  const auto offer = [](const std::string& text) {
    try {
      const allocator_options options = parse_options(text);
      ASSERT_NO_THROW(check(options)) << text;
      ASSERT_EQ(parse_options(to_string(options)), options) << text;
    } catch (const invalid_argument&) {
      // Any other exception fails the test.
    }
  };
  for (int i = 0; i < 5000; ++i) {
    std::string text;
    for (std::size_t n = random.below(40); n > 0; --n)
      text += letters[random.below(letters.size())];
    offer(text);
  }
  // Slips in strings that are right.
  for (int i = 0; i < 5000; ++i) {
    std::string text = to_string(random.next());
    for (std::size_t n = 1 + random.below(3); n > 0 && !text.empty(); --n) {
      const std::size_t at = random.below(text.size());
      switch (random.below(4)) {
        case 0:
          text.erase(at, 1 + random.below(10));
          break;
        case 1:
          text.insert(at, 1, letters[random.below(letters.size())]);
          break;
        case 2:
          text[at] = letters[random.below(letters.size())];
          break;
        default:
          text.resize(at);
          break;
      }
    }
    offer(text);
  }
}

// --- environment --------------------------------------------------------------------------------

class allocator_environment : public ::testing::Test {
 protected:
  static constexpr std::array k_names = {"EVMM_ALLOC_CONF", "PYTORCH_ALLOC_CONF",
                                         "PYTORCH_CUDA_ALLOC_CONF", "EVMM_NO_CACHING",
                                         "PYTORCH_NO_CUDA_MEMORY_CACHING"};
  void SetUp() override { clear(); }
  void TearDown() override { clear(); }
  static void clear() {
    for (const char* name : k_names) ::unsetenv(name);
  }
  static void set(const char* name, const char* value) { ::setenv(name, value, 1); }
  static std::string refused() {
    try {
      options_from_environment();
    } catch (const invalid_argument& failure) {
      return failure.what();
    }
    return "taken";
  }
};

TEST_F(allocator_environment, is_read_in_order) {
  EXPECT_EQ(options_from_environment(), allocator_options{});
  set("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:30");
  EXPECT_EQ(options_from_environment().max_split_size, 30_MiB);
  set("PYTORCH_ALLOC_CONF", "max_split_size_mb:40");
  EXPECT_EQ(options_from_environment().max_split_size, 40_MiB);
  set("EVMM_ALLOC_CONF", "expandable_segments:False");
  EXPECT_EQ(options_from_environment().max_split_size, std::nullopt);
  EXPECT_FALSE(options_from_environment().expandable_segments);
  set("EVMM_ALLOC_CONF", "");
  EXPECT_EQ(options_from_environment().max_split_size, 40_MiB);
}

TEST_F(allocator_environment, turns_caching_off) {
  for (const char* name : {"EVMM_NO_CACHING", "PYTORCH_NO_CUDA_MEMORY_CACHING"}) {
    set(name, "1");
    EXPECT_EQ(options_from_environment().backend, allocator_backend::none) << name;
    set(name, "0");
    EXPECT_EQ(options_from_environment().backend, allocator_backend::native) << name;
    set(name, "yes");
    EXPECT_THAT(refused(), HasSubstr(name));
    ::unsetenv(name);
  }
  set("PYTORCH_NO_CUDA_MEMORY_CACHING", "1");
  set("EVMM_NO_CACHING", "0");
  EXPECT_EQ(options_from_environment().backend, allocator_backend::native);
}

TEST_F(allocator_environment, errors_name_the_variable) {
  for (const char* name : {"EVMM_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}) {
    set(name, "backend:x");
    EXPECT_THAT(refused(), AllOf(HasSubstr(name), HasSubstr("position 9"), HasSubstr("native")));
    ::unsetenv(name);
  }
}

}  // namespace
}  // namespace evmm
