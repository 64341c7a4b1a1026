// SPDX-License-Identifier: Apache-2.0
// The CUDA driver on a fake libcuda (tests/support/fake_cuda.cpp): how it finds the library and how
// it calls it. Each test runs in a child process, since a process loads libcuda once.
#include "tests/support/in_child.hpp"

#include <evmm/driver.hpp>
#include <evmm/error.hpp>
#include <evmm/units.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

namespace evmm {
namespace {

using namespace evmm::units;
using test::in_child;
using testing::AllOf;
using testing::HasSubstr;

/// A function of the fake library, which the driver has loaded.
template <class Function>
Function* fake(const char* name) {
  void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  return reinterpret_cast<Function*>(::dlsym(library, name));
}

template <class Error>
std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& failure) {
    return failure.what();
  } catch (const std::exception& failure) {
    return std::string("another error: ") + failure.what();
  }
  return "no error";
}

std::string why_not() {
  std::string reason = "available";
  cuda_available(&reason);
  return reason;
}

constexpr memory_location k_device = memory_location::on(device_id{0});
constexpr memory_location k_host = memory_location::on(numa_node{0});

TEST(cuda_library, one_that_is_too_old_is_named_with_what_is_needed) {
  in_child({{"FAKE_CUDA_VERSION", "12020"}}, [] {
    EXPECT_THAT(why_not(), AllOf(HasSubstr("12.2"), HasSubstr("12.4 or later")));
    EXPECT_THAT(refusal<unsupported>([] { make_cuda_driver(); }), HasSubstr("update NVIDIA"));
  });
}

TEST(cuda_library, one_without_a_function_is_refused_by_name) {
  in_child({{"FAKE_CUDA_MISSING", "cuMemMap"}},
           [] { EXPECT_THAT(why_not(), HasSubstr("no cuMemMap")); });
}

TEST(cuda_library, hidden_devices_are_explained) {
  in_child({{"FAKE_CUDA_INIT", "100"}, {"CUDA_VISIBLE_DEVICES", "7"}}, [] {
    EXPECT_THAT(why_not(),
                AllOf(HasSubstr("CUDA_ERROR_NO_DEVICE"), HasSubstr("CUDA_VISIBLE_DEVICES=7")));
  });
}

TEST(cuda_library, an_error_without_a_name_shows_its_number) {
  in_child({{"FAKE_CUDA_INIT", "999"}},
           [] { EXPECT_THAT(why_not(), HasSubstr("CUDA error 999")); });
}

TEST(cuda_driver, tells_what_is_here) {
  in_child({}, [] {
    const auto on = make_cuda_driver();
    EXPECT_THAT(on->info().version, testing::StartsWith("13.0"));
    EXPECT_EQ(on->device_count(), 2);
    const auto first = on->describe(device_id{0});
    EXPECT_EQ(first.pci_bus_id, "0000:1b:00.0");
    EXPECT_EQ(first.host_node, std::nullopt);  // the driver says -1
    EXPECT_EQ(on->describe(device_id{1}).host_node, numa_node{0});
    EXPECT_TRUE(on->can_access(device_id{1}, device_id{1}));
    EXPECT_FALSE(on->can_access(device_id{0}, device_id{1}));
    EXPECT_THAT(refusal<invalid_argument>([&] { on->describe(device_id{2}); }),
                HasSubstr("there is no DEVICE 2"));
    EXPECT_THAT(refusal<invalid_argument>([&] { on->usage(memory_location::on(numa_node{-1})); }),
                HasSubstr("HOST_NUMA -1"));
  });
}

TEST(cuda_driver, a_threads_device_is_that_of_its_context) {
  in_child({}, [] {
    const auto on = make_cuda_driver();
    EXPECT_EQ(on->current_device(), std::nullopt);
    EXPECT_THAT(refusal<invalid_argument>([&] { on->set_current_device(device_id{2}); }),
                HasSubstr("there is no DEVICE 2"));
    for (const int wanted : {1, 0}) {
      on->set_current_device(device_id{wanted});
      EXPECT_EQ(on->current_device(), device_id{wanted});
    }
    on->set_current_device(std::nullopt);
    EXPECT_EQ(on->current_device(), std::nullopt);
    EXPECT_EQ(fake<int()>("fake_stack_depth")(), 0);
  });
}

TEST(cuda_driver, leaves_no_thread_on_a_context_that_died_with_it) {
  in_child({}, [] {
    {
      const auto on = make_cuda_driver();
      on->set_current_device(device_id{1});
    }
    const auto next = make_cuda_driver();
    EXPECT_EQ(next->current_device(), std::nullopt);
    EXPECT_NO_THROW(next->synchronize(native_stream{}));
  });
}

TEST(cuda_driver, leaves_a_thread_on_a_context_that_others_hold) {
  in_child({}, [] {
    const auto other = make_cuda_driver();
    other->set_current_device(device_id{1});
    {
      const auto on = make_cuda_driver();
      on->set_current_device(device_id{1});
    }
    EXPECT_EQ(other->current_device(), device_id{1});
  });
}

TEST(cuda_driver, fabric_is_proved_not_believed) {
  in_child({}, [] {
    const auto on = make_cuda_driver();
    EXPECT_FALSE(on->info().fabric_sharing);
    EXPECT_THAT(refusal<unsupported>([&] {
                  on->create({.bytes = 2_MiB, .where = k_device, .share = share_kind::fabric});
                }),
                AllOf(HasSubstr("NOT_PERMITTED"), HasSubstr("IMEX")));
  });
  in_child({{"FAKE_CUDA_FABRIC", "0"}}, [] {
    const auto on = make_cuda_driver();
    EXPECT_TRUE(on->info().fabric_sharing);
    const allocation_request request{
        .bytes = 2_MiB, .where = k_device, .share = share_kind::fabric};
    const auto made = on->create(request);
    on->release(on->import_fabric(on->export_fabric(made), request));
    EXPECT_THAT(refusal<invalid_argument>([&] { on->export_fd(made); }), HasSubstr("not created"));
    on->release(made);
  });
}

TEST(cuda_driver, memory_calls_make_no_context_and_stream_calls_leave_none_behind) {
  in_child({}, [] {
    auto on = make_cuda_driver();
    auto* const retained = fake<int(int)>("fake_retained");
    auto* const depth = fake<int()>("fake_stack_depth");
    const address base = on->reserve(4_MiB);
    const auto handle = on->create({.bytes = 2_MiB, .where = k_device});
    on->map(base, 2_MiB, handle);
    on->set_access(base, 2_MiB, std::vector<access_grant>{{k_device}});
    EXPECT_EQ(retained(0) + retained(1), 0);

    // A thread with no context, and streams of another device than the first one used.
    const native_stream second = on->create_stream(device_id{1});
    const native_stream first = on->create_stream(device_id{0});
    const native_event event = on->create_event(device_id{1});
    on->fill(base, std::byte{7}, 2_MiB, second);
    on->record(event, second);
    on->wait(first, event);
    std::byte seen{};
    on->copy(reinterpret_cast<address>(&seen), base + 2_MiB - 1, 1, first);
    EXPECT_TRUE(on->done(event));
    EXPECT_TRUE(on->idle(first));
    on->synchronize(event);
    on->synchronize(first);
    on->synchronize(native_stream{});
    EXPECT_EQ(seen, std::byte{7});
    EXPECT_EQ(depth(), 0);
    EXPECT_EQ(retained(0), 1);
    EXPECT_EQ(retained(1), 1);

    on->destroy_event(event);
    on->destroy_stream(first);
    on->destroy_stream(second);
    on->unmap(base, 2_MiB);
    on->free(base, 4_MiB);
    on->release(handle);
    on.reset();
    EXPECT_EQ(retained(0) + retained(1), 0);
  });
}

TEST(cuda_driver, running_out_says_what_is_free_and_who_holds_it) {
  in_child({{"FAKE_CUDA_BYTES", "8388608"}}, [] {
    const auto on = make_cuda_driver();
    const auto held = on->create({.bytes = 6_MiB, .where = k_device});
    EXPECT_THAT(
        refusal<out_of_memory>([&] { on->create({.bytes = 4_MiB, .where = k_device}); }),
        AllOf(HasSubstr("cannot create 4.0 MiB on DEVICE 0: 2.0 MiB of 8.0 MiB free, 6.0 MiB held"),
              HasSubstr("help: ")));
    on->release(held);
    on->release(on->create({.bytes = 8_MiB, .where = k_device}));
  });
}

TEST(cuda_driver, refuses_what_the_caller_could_have_known) {
  in_child({}, [] {
    const auto on = make_cuda_driver();
    const auto refused = [](const std::function<void()>& call) {
      return refusal<invalid_argument>(call);
    };
    EXPECT_THAT(refused([&] { on->reserve(0); }), HasSubstr("granularity 2.0 MiB"));
    EXPECT_THAT(refused([&] { on->reserve(2_MiB, 3_MiB); }), HasSubstr("power of two"));
    EXPECT_THAT(refused([&] { on->reserve(2_MiB, 0, 4096); }), HasSubstr("address hint"));
    EXPECT_THAT(refused([&] { on->create({.bytes = 1_MiB, .where = k_device}); }),
                HasSubstr("size to create is 1.0 MiB"));
    EXPECT_THAT(refused([&] { on->create({.bytes = 2_MiB, .where = k_host, .rdma = true}); }),
                HasSubstr("RDMA"));
    EXPECT_THAT(refused([&] {
                  on->create({.bytes = 2_MiB, .where = {tier::host, 4096}});
                }),
                HasSubstr("HOST_NUMA 4096"));
    EXPECT_THAT(refused([&] { on->release(allocation_handle{99}); }), HasSubstr("handle 0x63"));
    EXPECT_THAT(refused([&] { on->import_fd(-1, {.bytes = 2_MiB, .where = k_device}); }),
                HasSubstr("descriptor -1"));
    EXPECT_THAT(refused([&] { on->destroy_event(nullptr); }), HasSubstr("null"));
    EXPECT_THAT(refused([&] { on->destroy_stream(nullptr); }), HasSubstr("default stream"));
    EXPECT_THAT(refused([&] { on->launch(nullptr, {}); }), HasSubstr("empty"));

    const address base = on->reserve(4_MiB);
    const auto handle = on->create({.bytes = 2_MiB, .where = k_device});
    on->map(base, 2_MiB, handle);
    EXPECT_THAT(refused([&] { on->map(base, 2_MiB, handle); }), HasSubstr("are mapped"));
    const std::vector<access_grant> by_cpu = {{k_device}, {k_host}};
    EXPECT_THAT(refused([&] { on->set_access(base, 2_MiB, by_cpu); }), HasSubstr("CPUs"));
    EXPECT_THAT(refused([&] { on->free(base, 4_MiB); }), HasSubstr("still mapped"));
    on->unmap(base, 2_MiB);
    on->release(handle);
    on->free(base, 4_MiB);
  });
}

TEST(cuda_driver, descriptors_close_on_exec_and_bring_the_same_bytes) {
  in_child({}, [] {
    const auto on = make_cuda_driver();
    const allocation_request request{.bytes = 2_MiB, .where = k_host};
    const auto made = on->create(request);
    const unique_fd shared = on->export_fd(made);
    EXPECT_EQ(::fcntl(shared.get(), F_GETFD), FD_CLOEXEC);
    const auto imported = on->import_fd(shared.get(), request);
    const address base = on->reserve(4_MiB);
    on->map(base, 2_MiB, made);
    on->map(base + 2_MiB, 2_MiB, imported);
    on->set_access(base, 4_MiB, std::vector<access_grant>{{k_device}, {k_host}});
    std::memset(reinterpret_cast<void*>(base), 0x5a, 2_MiB);
    EXPECT_EQ(*reinterpret_cast<unsigned char*>(base + 4_MiB - 1), 0x5a);
    on->unmap(base, 2_MiB);
    on->unmap(base + 2_MiB, 2_MiB);
    on->release(made);
    on->release(imported);
    on->free(base, 4_MiB);
  });
}

TEST(cuda_driver, functions_run_and_what_they_throw_reaches_synchronize) {
  in_child({}, [] {
    const auto on = make_cuda_driver();
    const native_stream stream = on->create_stream(device_id{1});
    const auto alive = std::make_shared<int>(0);
    on->launch(stream, [alive] { ++*alive; });
    EXPECT_EQ(*alive, 1);
    EXPECT_EQ(alive.use_count(), 1);  // gone after it ran
    on->launch(stream, [] { throw std::runtime_error("from a stream"); });
    EXPECT_THAT(refusal<std::runtime_error>([&] { on->synchronize(stream); }),
                HasSubstr("from a stream"));
    on->synchronize(stream);  // once
    on->launch(stream, [&] { on->device_count(); });
    EXPECT_THAT(refusal<invalid_argument>([&] { on->synchronize(stream); }),
                HasSubstr("called the driver"));
    on->destroy_stream(stream);
  });
}

TEST(cuda_driver, work_that_ends_in_unmapped_addresses_does_not_begin) {
  in_child({}, [] {
    const auto on = make_cuda_driver();
    const native_stream stream = on->create_stream(device_id{0});
    const address base = on->reserve(6_MiB);
    const auto memory = on->create({.bytes = 2_MiB, .where = k_host});
    for (const address at : {base, base + 2_MiB}) {
      on->map(at, 2_MiB, memory);
      on->set_access(at, 2_MiB, std::vector<access_grant>{{k_device}, {k_host}});
    }
    on->fill(base, std::byte{1}, 4_MiB, stream);
    EXPECT_THAT(
        refusal<invalid_argument>([&] { on->fill(base + 1_MiB, std::byte{2}, 5_MiB, stream); }),
        HasSubstr("nothing is mapped from"));
    std::vector<std::byte> other(6_MiB, std::byte{3});
    const auto elsewhere = reinterpret_cast<address>(other.data());
    for (const std::size_t bytes : {6_MiB, ~std::size_t{0}}) {
      EXPECT_THAT(refusal<invalid_argument>([&] { on->copy(base, elsewhere, bytes, stream); }),
                  HasSubstr("cannot copy to"));
      EXPECT_THAT(refusal<invalid_argument>([&] { on->copy(elsewhere, base, bytes, stream); }),
                  HasSubstr("cannot copy from"));
    }
    on->copy(elsewhere, base, 4_MiB, stream);
    on->synchronize(stream);
    EXPECT_EQ(other.front(), std::byte{1});
    EXPECT_EQ(other[3_MiB], std::byte{1});
    for (const address at : {base, base + 2_MiB}) on->unmap(at, 2_MiB);
    on->release(memory);
    on->free(base, 6_MiB);
    on->destroy_stream(stream);
  });
}

TEST(cuda_driver, what_a_function_held_may_not_call_cuda_where_it_goes) {
  in_child({}, [] {
    auto on = make_cuda_driver();
    const native_stream stream = on->create_stream(device_id{0});
    std::string said;
    const auto last_words = [&said, &driver = *on](const int* word) {
      said = refusal<invalid_argument>([&] { driver.device_count(); });
      delete word;
    };
    on->launch(stream, [held = std::shared_ptr<int>(new int, last_words)] {});
    EXPECT_THAT(said, HasSubstr("called the driver"));
    on->destroy_stream(on->create_stream(device_id{0}));  // the thread itself may again
    // The last reference to the driver: its contexts stay, since nothing may be released there.
    driver& last = *on;
    last.launch(stream, [kept = std::move(on)] {});
    EXPECT_EQ(fake<int(int)>("fake_retained")(0), 1);
  });
}

TEST(cuda_driver, a_captured_function_lives_as_long_as_the_graph) {
  in_child({}, [] {
    const auto on = make_cuda_driver();
    const native_stream stream = on->create_stream(device_id{0});
    EXPECT_EQ(on->capture(stream).status, capture_status::none);
    EXPECT_EQ(on->capture(nullptr).status, capture_status::none);
    void* const graph = fake<void*(native_stream)>("fake_begin_capture")(stream);
    EXPECT_EQ(on->capture(stream).status, capture_status::active);
    EXPECT_EQ(on->capture(stream).id, 7u);
    const auto runs = std::make_shared<int>(0);
    on->launch(stream, [runs] { ++*runs; });
    fake<void(native_stream)>("fake_end_capture")(stream);
    EXPECT_EQ(*runs, 0);
    fake<void(void*)>("fake_run_graph")(graph);
    fake<void(void*)>("fake_run_graph")(graph);
    EXPECT_EQ(*runs, 2);
    EXPECT_EQ(runs.use_count(), 2);
    fake<void(void*)>("fake_destroy_graph")(graph);
    EXPECT_EQ(runs.use_count(), 1);
    on->destroy_stream(stream);
  });
}

TEST(cuda_driver, tells_what_captured_work_depends_on) {
  in_child({}, [] {
    const auto on = make_cuda_driver();
    const native_stream stream = on->create_stream(device_id{0});
    EXPECT_TRUE(on->capture_frontier(stream).empty());
    EXPECT_TRUE(on->capture_frontier(nullptr).empty());
    void* const graph = fake<void*(native_stream)>("fake_begin_capture")(stream);
    EXPECT_TRUE(on->capture_frontier(stream).empty());
    on->launch(stream, [] {});
    const auto first = on->capture_frontier(stream);
    ASSERT_EQ(first.size(), 1u);
    EXPECT_TRUE(on->graph_dependencies(first.front()).empty());
    on->launch(stream, [] {});
    const auto second = on->capture_frontier(stream);
    ASSERT_EQ(second.size(), 1u);
    EXPECT_EQ(on->graph_dependencies(second.front()), first);
    EXPECT_THAT(refusal<unsupported>([&] { on->allocate_async(device_id{0}, 512, stream); }),
                HasSubstr("captured"));
    fake<void(native_stream)>("fake_end_capture")(stream);
    fake<void(void*)>("fake_destroy_graph")(graph);
    on->destroy_stream(stream);
  });
}

TEST(cuda_driver, pinned_memory_is_portable_and_known) {
  in_child({{"FAKE_CUDA_BYTES", "8388608"}}, [] {
    const auto on = make_cuda_driver();
    const address at = on->allocate_pinned(2_MiB);
    EXPECT_THAT(refusal<out_of_memory>([&] { on->allocate_pinned(16_MiB); }),
                AllOf(HasSubstr("cannot pin 16.0 MiB: this process holds 2.0 MiB"),
                      HasSubstr("ulimit -l")));
    EXPECT_THAT(refusal<invalid_argument>([&] { on->pin(at, 4096); }), HasSubstr("already"));
    EXPECT_THAT(refusal<invalid_argument>([&] { on->free_pinned(at + 1); }), HasSubstr("nothing"));
    std::vector<std::byte> ordinary(4096);
    const auto lies = reinterpret_cast<address>(ordinary.data());
    on->pin(lies, ordinary.size());
    EXPECT_THAT(refusal<invalid_argument>([&] { on->pin(lies + 1, 8); }), HasSubstr("already"));
    EXPECT_THAT(refusal<invalid_argument>([&] { on->free_pinned(lies); }), HasSubstr("nothing"));
    on->unpin(lies);
    on->free_pinned(at);
    EXPECT_EQ(fake<int()>("fake_stack_depth")(), 0);
  });
}

TEST(cuda_driver, stream_ordered_memory_is_kept_by_the_device_s_pool) {
  in_child({{"FAKE_CUDA_BYTES", "8388608"}}, [] {
    const auto on = make_cuda_driver();
    const native_stream stream = on->create_stream(device_id{1});
    const address at = on->allocate_async(device_id{1}, 4_MiB, stream);
    EXPECT_EQ(on->async_usage(device_id{1}).used_bytes, 4_MiB);
    EXPECT_EQ(on->async_usage(device_id{0}).reserved_bytes, 0u);
    EXPECT_THAT(
        refusal<out_of_memory>([&] { on->allocate_async(device_id{1}, 16_MiB, stream); }),
        AllOf(HasSubstr("cannot allocate 16.0 MiB on DEVICE 1"), HasSubstr("pool holds 4.0 MiB")));
    on->free_async(at, stream);
    EXPECT_THAT(refusal<invalid_argument>([&] { on->free_async(at, stream); }), HasSubstr("freed"));
    EXPECT_EQ(on->async_usage(device_id{1}).used_bytes, 0u);
    EXPECT_EQ(on->async_usage(device_id{1}).reserved_bytes, 4_MiB);
    on->trim_async(device_id{1}, 0);
    EXPECT_EQ(on->async_usage(device_id{1}).reserved_bytes, 0u);
    on->destroy_stream(stream);
  });
}

TEST(cuda_driver, streams_store_and_wait_for_words) {
  in_child({}, [] {
    const auto on = make_cuda_driver();
    const native_stream stream = on->create_stream(device_id{1});
    const address at = on->allocate_pinned(4096);
    on->store_word(at + 8, 41, stream);
    on->wait_word(at + 8, 40, stream);
    EXPECT_EQ(reinterpret_cast<const std::uint64_t*>(at)[1], 41u);
    EXPECT_THROW(on->store_word(at + 4, 1, stream), invalid_argument);
    on->free_pinned(at);
    on->destroy_stream(stream);
  });
}

TEST(cuda_driver, nobody_is_told_to_use_a_device_without_nvml) {
  in_child({}, [] {
    const auto on = make_cuda_driver();
    EXPECT_TRUE(on->processes(device_id{0}).empty());
    EXPECT_THAT(refusal<invalid_argument>([&] { on->processes(device_id{7}); }),
                HasSubstr("DEVICE 7"));
  });
}

TEST(cuda_driver, a_forked_child_is_refused) {
  in_child({}, [] {
    auto on = make_cuda_driver();
    const native_stream stream = on->create_stream(device_id{0});
    in_child({}, [&] {
      EXPECT_THAT(refusal<invalid_argument>([&] { on->synchronize(stream); }), HasSubstr("fork"));
      EXPECT_THAT(why_not(), HasSubstr("before this process was forked"));
      on.reset();  // touches nothing of the parent's
      EXPECT_EQ(fake<int(int)>("fake_retained")(0), 1);
    });
    on->destroy_stream(stream);
  });
}

}  // namespace
}  // namespace evmm
