// SPDX-License-Identifier: Apache-2.0
// What libevmm_torch.so is, and its allocations.
#include "tests/unit/torch_face.hpp"

#include <evmm/allocator/snapshot.hpp>
#include <evmm/version.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <sstream>
#include <string>
#include <typeinfo>

#include <dlfcn.h>
#include <link.h>

namespace evmm::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::StartsWith;

TEST_F(torch_face, tells_its_version) {
  EXPECT_STREQ(FROM_LIBRARY(evmm_torch_version)(), EVMM_VERSION);
}

TEST_F(torch_face, shows_its_c_functions_alone) {
  FILE* const pipe = ::popen("nm -D --defined-only " EVMM_TORCH_LIBRARY " 2>/dev/null", "r");
  ASSERT_NE(pipe, nullptr);
  std::string text;
  for (char part[4096]; const std::size_t n = std::fread(part, 1, sizeof part, pipe);) {
    text.append(part, n);
  }
  if (::pclose(pipe) != 0) GTEST_SKIP() << "nm is not installed";
  std::istringstream lines(text);
  int count = 0;
  for (std::string address, kind, name; lines >> address >> kind >> name; ++count) {
    EXPECT_THAT(name, StartsWith("evmm_torch_"));
    EXPECT_EQ(kind, "T") << name;
  }
  EXPECT_EQ(count, 25);
}

// A library that is loaded late shares what little room the C library keeps for thread-local data
// that is found without a call.
TEST_F(torch_face, needs_little_static_thread_local_storage) {
  link_map* loaded = nullptr;
  ASSERT_EQ(::dlinfo(library(), RTLD_DI_LINKMAP, &loaded), 0);
  struct {
    std::uintptr_t base;
    std::size_t bytes;
  } wanted{loaded->l_addr, 0};
  ::dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* to) {
        auto& its = *static_cast<decltype(wanted)*>(to);
        if (info->dlpi_addr != its.base) return 0;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          if (info->dlpi_phdr[i].p_type == PT_TLS) its.bytes = info->dlpi_phdr[i].p_memsz;
        }
        return 1;
      },
      &wanted);
  EXPECT_GT(wanted.bytes, 0u);
  EXPECT_LE(wanted.bytes, 768u);
}

TEST_F(torch_face, allocates_and_frees) {
  EXPECT_EQ(allocate(0), nullptr);
  void* const at = allocate(3 * k_mib);
  ASSERT_NE(at, nullptr);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(at) % 512, 0u);
  free(at);
  free(nullptr);
  void* const again = allocate(3 * k_mib);
  EXPECT_EQ(again, at);
  free(again);
  EXPECT_THAT(last_error(), IsEmpty());
}

TEST_F(torch_face, devices_have_their_own) {
  void* const at = allocate(1000, 1);
  ASSERT_NE(at, nullptr);
  EXPECT_EQ(statistics(1)["allocation.all.current"], 1);
  EXPECT_EQ(statistics(0)["allocation.all.current"], 0);
  free(at, 1);
  EXPECT_EQ(allocate(1000, 2), nullptr);
  EXPECT_EQ(FROM_LIBRARY(evmm_torch_last_code)(), EVMM_TORCH_INVALID_ARGUMENT);
  EXPECT_THAT(last_error(), HasSubstr("no device 2"));
  EXPECT_EQ(allocate(1000, -1), nullptr);
  EXPECT_EQ(allocate(-1), nullptr);
  EXPECT_THAT(last_error(), HasSubstr("-1 bytes"));
}

TEST_F(torch_face, an_unknown_pointer_is_an_error) {
  int mine = 0;
  free(&mine);
  EXPECT_EQ(FROM_LIBRARY(evmm_torch_last_code)(), EVMM_TORCH_INVALID_ARGUMENT);
}

TEST_F(torch_face, out_of_memory_is_null_with_a_message) {
  void* const held = allocate(40 * k_mib);
  ASSERT_NE(held, nullptr);
  EXPECT_EQ(allocate(40 * k_mib), nullptr);
  EXPECT_EQ(FROM_LIBRARY(evmm_torch_last_code)(), EVMM_TORCH_OUT_OF_MEMORY);
  EXPECT_THAT(last_error(), HasSubstr("cannot allocate 40.0 MiB"));
  void* const small = allocate(k_mib);
  EXPECT_NE(small, nullptr);
  EXPECT_THAT(last_error(), IsEmpty());
  free(small);
  free(held);
}

// With libraries of PyTorch's names in the process the hooks raise.
TEST_F(torch_face, out_of_memory_in_pytorch_is_its_exception) {
  const auto close = [](void* handle) { ::dlclose(handle); };
  const std::unique_ptr<void, decltype(close)> c10(::dlopen(EVMM_FAKE_C10, RTLD_NOW), close);
  ASSERT_NE(c10, nullptr);
  // A PyTorch that lacks what the exception is made from.
  try {
    allocate(100 * k_mib);
    ADD_FAILURE() << "nothing was raised";
  } catch (const std::runtime_error& failure) {
    EXPECT_THAT(failure.what(), HasSubstr("out_of_memory: cannot allocate 100.0 MiB"));
  }
  {
    const std::unique_ptr<void, decltype(close)> cuda(::dlopen(EVMM_FAKE_C10_CUDA, RTLD_NOW),
                                                      close);
    ASSERT_NE(cuda, nullptr);
    for (int i = 0; i < 3; ++i) {
      try {
        allocate(100 * k_mib);
        ADD_FAILURE() << "nothing was raised";
      } catch (const std::exception& failure) {
        EXPECT_STREQ(typeid(failure).name(), "N3c1016OutOfMemoryErrorE");
        EXPECT_THAT(failure.what(), AllOf(StartsWith("CUDA out of memory. "),
                                          HasSubstr("cannot allocate 100.0 MiB")));
      }
    }
    // The pair behind a MemPool returns null, which PyTorch raises by itself.
    EXPECT_EQ(FROM_LIBRARY(evmm_torch_host_tier_alloc)(100_TiB, 0, nullptr), nullptr);
    EXPECT_EQ(FROM_LIBRARY(evmm_torch_last_code)(), EVMM_TORCH_OUT_OF_MEMORY);
    EXPECT_THROW(allocate(1, 77), std::runtime_error);
  }
}

TEST_F(torch_face, base_is_where_the_memory_begins) {
  void* const first = allocate(1000);
  void* const second = allocate(1000);
  std::size_t bytes = 0;
  void* const base = FROM_LIBRARY(evmm_torch_base)(second, &bytes);
  EXPECT_EQ(base, FROM_LIBRARY(evmm_torch_base)(first, nullptr));
  EXPECT_LE(base, second);
  EXPECT_GE(bytes, 2048u);
  int mine = 0;
  EXPECT_EQ(FROM_LIBRARY(evmm_torch_base)(&mine, &bytes), nullptr);
  EXPECT_EQ(FROM_LIBRARY(evmm_torch_last_code)(), EVMM_TORCH_INVALID_ARGUMENT);
  free(first);
  free(second);
}

TEST_F(torch_face, record_stream_passes_over_what_it_does_not_know) {
  int mine = 0;
  const auto record = FROM_LIBRARY(evmm_torch_record_stream);
  record(nullptr, nullptr);
  record(&mine, nullptr);
  void* const at = allocate(1000);
  record(at, nullptr);  // its own stream
  EXPECT_THAT(last_error(), IsEmpty());
  free(at);
  EXPECT_EQ(statistics()["active.all.current"], 0);
}

}  // namespace
}  // namespace evmm::test
