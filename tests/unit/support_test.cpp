// SPDX-License-Identifier: Apache-2.0
#include "lib/support/environment.hpp"
#include "lib/support/format.hpp"
#include "lib/support/log.hpp"
#include "lib/support/text_file.hpp"
#include "lib/support/thread_object.hpp"

#include <evmm/error.hpp>
#include <evmm/unique_fd.hpp>
#include <evmm/units.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

namespace evmm {
namespace {

using namespace evmm::units;
using ::testing::AllOf;
using ::testing::HasSubstr;

// --- format -------------------------------------------------------------------------------------

TEST(format, writes_sizes_as_people_say_them) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(17), "17 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1_KiB), "1.0 KiB");
  EXPECT_EQ(format_bytes(512_MiB), "512.0 MiB");
  EXPECT_EQ(format_bytes(1536_MiB), "1.5 GiB");
  EXPECT_EQ(format_bytes(4096_TiB), "4096.0 TiB");
  EXPECT_EQ(format_address(0x7f12a4000000), "0x7f12a4000000");
  EXPECT_EQ(to_string(memory_location::on(device_id{3})), "DEVICE 3");
  EXPECT_EQ(to_string(memory_location::on(numa_node{1})), "HOST_NUMA 1");
}

TEST(format, reads_sizes_in_powers_of_two) {
  EXPECT_EQ(parse_bytes("0", "x"), 0u);
  EXPECT_EQ(parse_bytes("4096", "x"), 4096u);
  EXPECT_EQ(parse_bytes("7B", "x"), 7u);
  EXPECT_EQ(parse_bytes("64K", "x"), 64_KiB);
  EXPECT_EQ(parse_bytes("512 MiB", "x"), 512_MiB);
  EXPECT_EQ(parse_bytes("2GB", "x"), 2_GiB);
  EXPECT_EQ(parse_bytes("1T", "x"), 1_TiB);
}

TEST(format, refuses_what_is_no_size_and_names_it) {
  for (const char* text : {"", " ", "G", "-1", "1.5G", "1X", "1 G B", "1GiBs", "0x10",
                           "18446744073709551616", "17000000T", "1M "}) {
    try {
      parse_bytes(text, "EVMM_SOME_SIZE");
      ADD_FAILURE() << "'" << text << "' was taken for a size";
    } catch (const invalid_argument& failure) {
      EXPECT_THAT(failure.what(), AllOf(HasSubstr("EVMM_SOME_SIZE"), HasSubstr(text)));
      EXPECT_FALSE(failure.help().empty());
    }
  }
}

// --- environment --------------------------------------------------------------------------------

constexpr const char* k_name = "EVMM_TEST_OF_ENVIRONMENT";

class environment_test : public ::testing::Test {
 protected:
  void TearDown() override { ::unsetenv(k_name); }
  static void set(const char* value) { ::setenv(k_name, value, 1); }
};

TEST_F(environment_test, unset_and_empty_are_nothing) {
  EXPECT_EQ(environment(k_name), std::nullopt);
  set("");
  EXPECT_EQ(environment(k_name), std::nullopt);
  EXPECT_EQ(environment_integer(k_name, 0, 9), std::nullopt);
  EXPECT_EQ(environment_bytes(k_name), std::nullopt);
}

TEST_F(environment_test, reads_integers_within_their_bounds) {
  for (const auto& [text, value] : {std::pair{"0", 0L}, {"-3", -3L}, {"9", 9L}}) {
    set(text);
    EXPECT_EQ(environment_integer(k_name, -3, 9), value);
  }
  for (const char* text : {"10", "-4", "2x", "x", " 1", "1e1", "99999999999999999999"}) {
    set(text);
    try {
      static_cast<void>(environment_integer(k_name, -3, 9));
      ADD_FAILURE() << text;
    } catch (const invalid_argument& failure) {
      EXPECT_THAT(failure.what(), AllOf(HasSubstr(k_name), HasSubstr(text), HasSubstr("-3 to 9")));
    }
  }
}

TEST_F(environment_test, reads_sizes) {
  set("3M");
  EXPECT_EQ(environment_bytes(k_name), 3_MiB);
  set("three");
  EXPECT_THROW(environment_bytes(k_name), invalid_argument);
}

// --- error --------------------------------------------------------------------------------------

TEST(text_file, what_opens_and_cannot_be_read_is_nothing) {
  EXPECT_EQ(read_text("/proc/no such file"), std::nullopt);
  EXPECT_EQ(read_text("/proc/self"), std::nullopt);
  EXPECT_EQ(read_line("/proc/self/mem"), std::nullopt);
  EXPECT_THAT(read_line("/proc/self/comm").value_or(""), HasSubstr("evmm"));
  EXPECT_EQ(read_text("/dev/null"), "");
  EXPECT_EQ(read_line("/dev/null"), "");
}

TEST(error, carries_what_was_asked_and_what_would_help) {
  const out_of_memory failure("cannot create 2.0 MiB", "ask for less", 2);
  EXPECT_STREQ(failure.what(), "out_of_memory: cannot create 2.0 MiB; help: ask for less");
  EXPECT_EQ(failure.category(), error_category::out_of_memory);
  EXPECT_EQ(failure.native_code(), 2);
  EXPECT_EQ(failure.message(), "cannot create 2.0 MiB");
  EXPECT_EQ(failure.help(), "ask for less");
  EXPECT_THAT(failure.where().file_name(), HasSubstr("support_test.cpp"));
  EXPECT_STREQ(peer_error("rank 3 left").what(), "peer_error: rank 3 left");
}

template <class Type>
void expect_thrown(error_category category, const char* name) {
  EXPECT_STREQ(to_string(category), name);
  try {
    throw_error(category, {.message = "m", .help = "h", .native_code = 7});
  } catch (const Type& failure) {
    EXPECT_EQ(failure.category(), category);
    EXPECT_EQ(failure.native_code(), 7);
    return;
  } catch (...) {
  }
  ADD_FAILURE() << name << " throws another type";
}

TEST(error, comes_as_the_type_of_its_category) {
  expect_thrown<invalid_argument>(error_category::invalid_argument, "invalid_argument");
  expect_thrown<out_of_memory>(error_category::out_of_memory, "out_of_memory");
  expect_thrown<driver_error>(error_category::driver_error, "driver_error");
  expect_thrown<peer_error>(error_category::peer_error, "peer_error");
  expect_thrown<unsupported>(error_category::unsupported, "unsupported");
  expect_thrown<timed_out>(error_category::timed_out, "timed_out");
}

// --- log and descriptors ------------------------------------------------------------------------

TEST(log, keeps_what_clean_up_throws_and_says_what_was_being_done) {
  EXPECT_TRUE(log_failure("nothing", [] {}));
  ::testing::internal::CaptureStderr();
  EXPECT_FALSE(log_failure("giving back", [] { throw std::runtime_error("was busy"); }));
  EXPECT_FALSE(log_failure("giving up", [] { throw 5; }));
  const auto logged = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(logged, AllOf(HasSubstr("giving back: was busy"), HasSubstr("giving up")));
}

TEST(unique_fd, closes_what_it_owns_once) {
  const auto open_one = [] { return ::open("/dev/null", O_RDONLY | O_CLOEXEC); };
  const auto is_open = [](int fd) { return ::fcntl(fd, F_GETFD) != -1; };
  const int number = open_one();
  {
    unique_fd first(number);
    EXPECT_TRUE(first);
    unique_fd second(std::move(first));
    EXPECT_EQ(second.get(), number);
    EXPECT_TRUE(is_open(number));
    auto* const itself = &second;
    second = std::move(*itself);
    EXPECT_TRUE(is_open(number));
  }
  EXPECT_FALSE(is_open(number));

  unique_fd kept(open_one());
  const int replaced = kept.get();
  const int next = open_one();
  kept = unique_fd(next);
  EXPECT_FALSE(is_open(replaced));
  const int released = kept.release();
  EXPECT_FALSE(kept);
  EXPECT_TRUE(is_open(released));
  ::close(released);
}

// --- threads ------------------------------------------------------------------------------------

struct counted {
  static inline int alive = 0;
  counted() noexcept { ++alive; }
  ~counted() { --alive; }
  std::string text;
};

/// Looks at the thread's object when the thread ends.
struct late {
  static inline std::string seen;
  ~late() {
    seen = thread_object<counted>().text;
    thread_object<counted>().text = "later still, and too long for a string without memory";
  }
};

TEST(thread_object, serves_whoever_outlives_it) {
  late::seen = "nothing";
  std::thread([] {
    static thread_local const late looks;  // made first, so destroyed last
    static_cast<void>(looks);
    thread_object<counted>().text = "of the thread";
    EXPECT_EQ(thread_object<counted>().text, "of the thread");
    EXPECT_EQ(counted::alive, 1);
  }).join();
  EXPECT_EQ(late::seen, "") << "a new one";
  EXPECT_EQ(counted::alive, 1) << "which stays";
  std::thread([] { thread_object<counted>().text = "of another"; }).join();
  EXPECT_EQ(counted::alive, 1) << "others go with their threads";
}

}  // namespace
}  // namespace evmm
