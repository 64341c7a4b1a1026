// SPDX-License-Identifier: Apache-2.0
// What a program meets on a machine without a GPU, or in a build without CUDA.
#include <evmm/driver.hpp>
#include <evmm/error.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace evmm {
namespace {

class without_cuda : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda_available()) GTEST_SKIP() << "there is a GPU here";
  }
};

TEST_F(without_cuda, says_why_it_is_not_available) {
  std::string why_not;
  EXPECT_FALSE(cuda_available(&why_not));
  EXPECT_THAT(why_not,
              testing::MatchesRegex("no CUDA driver: .*|the CUDA driver .*|CUDA does not start: .*|"
                                    "evmm was built without CUDA"));
}

TEST_F(without_cuda, making_a_driver_throws_the_same_reason_and_a_remedy) {
  std::string why_not;
  cuda_available(&why_not);
  try {
    make_cuda_driver();
    FAIL() << "a CUDA driver was made";
  } catch (const unsupported& failure) {
    EXPECT_EQ(failure.message(), why_not);
    EXPECT_NE(failure.help(), "");
  }
}

TEST_F(without_cuda, the_answer_does_not_change) {
  std::string first;
  std::string second;
  cuda_available(&first);
  EXPECT_FALSE(cuda_available(&second));
  EXPECT_EQ(first, second);
}

TEST(cuda_available, leaves_the_reason_alone_when_there_is_a_gpu) {
  std::string why_not = "untouched";
  if (!cuda_available(&why_not)) GTEST_SKIP() << why_not;
  EXPECT_EQ(why_not, "untouched");
  EXPECT_EQ(make_cuda_driver()->info().kind, driver_kind::cuda);
}

}  // namespace
}  // namespace evmm
