// SPDX-License-Identifier: Apache-2.0
// The routing file of examples/01_moe_exchange, its errors, and the generator.
#include "routing.hpp"

#include <evmm/error.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <set>
#include <string>

#include <sys/stat.h>
#include <unistd.h>

namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(moe_routing, reads_the_documented_format) {
  const auto read = moe::parse_routing(
      "# expert ids,weights\n"
      "\n"
      "  \t\n"
      "43 5,0.75 0.25\n"
      " 0\t7 , 1e-3  0.5 \r\n"
      "1 2,0 1",  // no newline at the end
      "t.csv");
  EXPECT_EQ(read.tokens(), 3u);
  EXPECT_EQ(read.top_k, 2);
  EXPECT_EQ(read.experts, 44);
  EXPECT_THAT(read.ids, ElementsAre(43, 5, 0, 7, 1, 2));
  EXPECT_THAT(read.weights, ElementsAre(0.75f, 0.25f, 1e-3f, 0.5f, 0.0f, 1.0f));
}

TEST(moe_routing, takes_the_number_of_experts_when_told) {
  EXPECT_EQ(moe::parse_routing("1 2,1 1\n", "t.csv", 60).experts, 60);
}

struct bad_line {
  const char* text;
  const char* complaint;
};

class moe_routing_errors : public testing::TestWithParam<bad_line> {};

TEST_P(moe_routing_errors, are_refused_with_file_line_and_reason) {
  try {
    moe::parse_routing(std::string("# comment\n1 2,0.5 0.5\n") + GetParam().text, "bad.csv", 8);
    FAIL() << "accepted: " << GetParam().text;
  } catch (const evmm::invalid_argument& refused) {
    EXPECT_THAT(refused.message(), HasSubstr("bad.csv:3: "));
    EXPECT_THAT(refused.message(), HasSubstr(GetParam().complaint));
  }
}

INSTANTIATE_TEST_SUITE_P(
    lines, moe_routing_errors,
    testing::Values(bad_line{"1 2 0.5 0.5", "no comma"}, bad_line{"1 2,0.5 0.5,", "one comma"},
                    bad_line{",0.5 0.5", "no expert id"},
                    bad_line{"1 2,0.5", "2 expert ids, but 1"},
                    bad_line{"1,0.5", "1 experts, but the tokens before have 2"},
                    bad_line{"1 x,0.5 0.5", "'x' is not an expert id"},
                    bad_line{"1 -2,0.5 0.5", "'-2' is not an expert id"},
                    bad_line{"1 2.0,0.5 0.5", "'2.0' is not an expert id"},
                    bad_line{"1 99999999999,0.5 0.5", "is not an expert id"},
                    bad_line{"1 8,0.5 0.5", "expert 8 is beyond the 8"},
                    bad_line{"3 3,0.5 0.5", "expert 3 is named twice"},
                    bad_line{"1 2,0.5 nan", "'nan' is not a weight"},
                    bad_line{"1 2,0.5 -0.5", "'-0.5' is not a weight"},
                    bad_line{"1 2,0.5 0.5x", "'0.5x' is not a weight"}));

TEST(moe_routing, refuses_a_file_without_tokens_and_one_that_is_not_there) {
  EXPECT_THROW(moe::parse_routing("# nothing\n", "t.csv"), evmm::invalid_argument);
  EXPECT_THROW(moe::read_routing("/nonexistent/routing.csv"), evmm::invalid_argument);
}

class moe_routing_file : public testing::Test {
 protected:
  void TearDown() override { std::remove(path_.c_str()); }
  std::string path_ = testing::TempDir() + "moe_routing_" + std::to_string(getpid()) + ".csv.gz";
};

TEST_F(moe_routing_file, may_be_gzipped_and_must_be_complete) {
  std::string text;
  for (int line = 0; line < 5000; ++line) {
    text += std::to_string(line * 7919 % 60) + ",0." + std::to_string(line * 104729 % 9973) + "\n";
  }
  gzFile file = gzopen(path_.c_str(), "wb");
  ASSERT_EQ(gzwrite(file, text.data(), static_cast<unsigned>(text.size())),
            static_cast<int>(text.size()));
  gzclose(file);
  EXPECT_EQ(moe::read_routing(path_).tokens(), 5000u);

  struct stat status {};
  ASSERT_EQ(stat(path_.c_str(), &status), 0);
  ASSERT_EQ(truncate(path_.c_str(), status.st_size / 2), 0);
  EXPECT_THROW(moe::read_routing(path_), evmm::invalid_argument);
}

TEST(moe_generator, is_reproducible_sorted_and_normalised) {
  const moe::routing_recipe recipe{.experts = 16, .top_k = 3, .tokens = 200, .skew = 1, .seed = 7};
  const auto made = moe::generate_routing(recipe);
  EXPECT_EQ(made.tokens(), 200u);
  EXPECT_EQ(made.ids, moe::generate_routing(recipe).ids);
  for (std::size_t t = 0; t < 200; ++t) {
    const std::set<std::int32_t> distinct(
        made.ids.begin() + static_cast<std::ptrdiff_t>(3 * t),
        made.ids.begin() + static_cast<std::ptrdiff_t>(3 * t + 3));
    EXPECT_EQ(distinct.size(), 3u);
    EXPECT_GE(made.weights[3 * t], made.weights[3 * t + 1]);
    EXPECT_GE(made.weights[3 * t + 1], made.weights[3 * t + 2]);
    EXPECT_NEAR(made.weights[3 * t] + made.weights[3 * t + 1] + made.weights[3 * t + 2], 1, 1e-5);
  }
}

TEST(moe_generator, draws_as_the_skew_says) {
  const auto share_of_first_half = [](double skew) {
    const auto made = moe::generate_routing(
        {.experts = 16, .top_k = 1, .tokens = 20000, .skew = skew, .seed = 3});
    return static_cast<double>(
               std::count_if(made.ids.begin(), made.ids.end(), [](int id) { return id < 8; })) /
           20000;
  };
  double first = 0;
  double all = 0;
  for (int e = 0; e < 16; ++e) (e < 8 ? first : all) += 1.0 / (e + 1);
  all += first;
  EXPECT_NEAR(share_of_first_half(0), 0.5, 0.02);
  EXPECT_NEAR(share_of_first_half(1), first / all, 0.02);
}

TEST(moe_generator, refuses_more_choices_than_experts) {
  EXPECT_THROW(moe::generate_routing({.experts = 2, .top_k = 3}), evmm::invalid_argument);
}

}  // namespace
