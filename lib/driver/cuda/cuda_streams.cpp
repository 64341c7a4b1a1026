// SPDX-License-Identifier: Apache-2.0
#include "lib/driver/cuda/cuda_driver.hpp"
#include "lib/driver/cuda/cuda_error.hpp"
#include "lib/support/format.hpp"
#include "lib/support/log.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace evmm {

namespace {

void check_event(native_event event) {
  if (event == nullptr) throw invalid_argument("the event is null");
}

void check_address(address at, const char* what) {
  if (at == 0) throw invalid_argument(fmt::format("the address to {} is null", what));
}

void check_word(address at) {
  check_address(at, "store or wait for");
  if (at % sizeof(std::uint64_t) != 0) {
    throw invalid_argument(fmt::format("the word at {} is not aligned to 8", format_address(at)));
  }
}

graph_node node_of(CUgraphNode node) {
  return graph_node{reinterpret_cast<std::uintptr_t>(node)};
}

/// Success or not-ready as an answer, anything else as an error.
template <class Doing>
bool answer(const cuda_api& api, CUresult result, Doing&& doing) {
  if (result == CUDA_ERROR_NOT_READY) return false;
  check(api, result, std::forward<Doing>(doing));
  return true;
}

}  // namespace

native_stream cuda_driver::create_stream(device_id device) {
  check_caller();
  entry(device);
  const outside_capture relaxed(api_);
  const auto current = context_scope::of(contexts_, device);
  CUstream stream = nullptr;
  check(api_, api_.stream_create(&stream, CU_STREAM_NON_BLOCKING),
        [&] { return fmt::format("create a stream on DEVICE {}", device.value); });
  return stream;
}

void cuda_driver::destroy_stream(native_stream stream) {
  check_caller();
  if (stream == nullptr) throw invalid_argument("the default stream cannot be destroyed");
  if (failures_->take(stream)) log().error("a stream is destroyed whose failure nobody asked for");
  check_return(api_, api_.stream_destroy(stream), [] { return "destroy a stream"; });
}

void cuda_driver::synchronize(native_stream stream) {
  check_caller();
  {
    const outside_capture relaxed(api_);
    const auto current = context_scope::any(contexts_);
    check(api_, api_.stream_synchronize(stream), [] { return "synchronise a stream"; });
  }
  if (const auto failure = failures_->take(stream)) std::rethrow_exception(failure);
}

bool cuda_driver::idle(native_stream stream) {
  check_caller();
  const outside_capture relaxed(api_);
  const auto current = context_scope::any(contexts_);
  return answer(api_, api_.stream_query(stream), [] { return "query a stream"; });
}

native_event cuda_driver::create_event(device_id device) {
  check_caller();
  entry(device);
  const outside_capture relaxed(api_);
  const auto current = context_scope::of(contexts_, device);
  CUevent event = nullptr;
  check(api_, api_.event_create(&event, CU_EVENT_DISABLE_TIMING),
        [&] { return fmt::format("create an event on DEVICE {}", device.value); });
  return event;
}

void cuda_driver::destroy_event(native_event event) {
  check_caller();
  check_event(event);
  check_return(api_, api_.event_destroy(event), [] { return "destroy an event"; });
}

void cuda_driver::record(native_event event, native_stream stream) {
  check_caller();
  check_event(event);
  const auto current = context_scope::any(contexts_);
  check(api_, api_.event_record(event, stream),
        [] { return "record an event on a stream (both must be of one device)"; });
}

bool cuda_driver::done(native_event event) {
  check_caller();
  check_event(event);
  const outside_capture relaxed(api_);
  const auto current = context_scope::any(contexts_);
  return answer(api_, api_.event_query(event), [] { return "query an event"; });
}

void cuda_driver::synchronize(native_event event) {
  check_caller();
  check_event(event);
  const outside_capture relaxed(api_);
  const auto current = context_scope::any(contexts_);
  check(api_, api_.event_synchronize(event), [] { return "synchronise an event"; });
}

void cuda_driver::wait(native_stream stream, native_event event) {
  check_caller();
  check_event(event);
  const auto current = context_scope::any(contexts_);
  check(api_, api_.stream_wait_event(stream, event, CU_EVENT_WAIT_DEFAULT),
        [] { return "make a stream wait for an event"; });
}

void cuda_driver::copy(address to, address from, std::size_t bytes, native_stream stream) {
  check_caller();
  if (bytes == 0) return;
  check_address(to, "copy to");
  check_address(from, "copy from");
  std::size_t there = ledger_.check_work(to, bytes, "copy to");
  std::size_t here = ledger_.check_work(from, bytes, "copy from");
  const auto current = context_scope::of(contexts_, stream);
  // Addresses are unified: the driver finds out which memory each is, but by the first byte alone.
  // One copy over DEVICE and HOST_NUMA mappings crashes in it (580.159.04), so none spans both.
  for (;;) {
    const std::size_t piece = std::min(there, here);
    check(api_, api_.memcpy_async(to, from, piece, stream), [&] {
      return fmt::format("copy {} from {} to {}", format_bytes(piece), format_address(from),
                         format_address(to));
    });
    if ((bytes -= piece) == 0) return;
    there = ledger_.bytes_in_one_place(to += piece, bytes);
    here = ledger_.bytes_in_one_place(from += piece, bytes);
  }
}

void cuda_driver::fill(address at, std::byte value, std::size_t bytes, native_stream stream) {
  check_caller();
  if (bytes == 0) return;
  check_address(at, "fill");
  std::size_t piece = ledger_.check_work(at, bytes, "fill");
  const auto current = context_scope::of(contexts_, stream);
  for (;;) {  // as in copy
    check(api_, api_.memset_d8_async(at, std::to_integer<unsigned char>(value), piece, stream),
          [&] { return fmt::format("fill {} at {}", format_bytes(piece), format_address(at)); });
    if ((bytes -= piece) == 0) return;
    piece = ledger_.bytes_in_one_place(at += piece, bytes);
  }
}

void cuda_driver::store_word(address at, std::uint64_t value, native_stream stream) {
  check_caller();
  check_word(at);
  const auto current = context_scope::of(contexts_, stream);
  check(api_, api_.stream_write_value(stream, at, value, CU_STREAM_WRITE_VALUE_DEFAULT),
        [&] { return fmt::format("store the word at {} in stream order", format_address(at)); });
}

void cuda_driver::wait_word(address at, std::uint64_t least, native_stream stream) {
  check_caller();
  check_word(at);
  const auto current = context_scope::of(contexts_, stream);
  check(api_, api_.stream_wait_value(stream, at, least, CU_STREAM_WAIT_VALUE_GEQ),
        [&] { return fmt::format("make a stream wait for the word at {}", format_address(at)); });
}

void cuda_driver::launch(native_stream stream, std::function<void()> function) {
  check_caller();
  if (!function) throw invalid_argument("the function to launch is empty");
  const auto current = context_scope::of(contexts_, stream);
  launch_host_function(api_, stream, std::move(function), failures_);
}

capture_info cuda_driver::capture(native_stream stream) const {
  check_caller();
  const auto current = context_scope::any(contexts_);
  const stream_capture found = query_capture(api_, stream);
  switch (found.status) {
    case CU_STREAM_CAPTURE_STATUS_ACTIVE:
      return {.status = capture_status::active, .id = found.id};
    case CU_STREAM_CAPTURE_STATUS_INVALIDATED:
      return {.status = capture_status::invalidated, .id = 0};
    case CU_STREAM_CAPTURE_STATUS_NONE:
      break;
  }
  return {};
}

std::vector<graph_node> cuda_driver::capture_frontier(native_stream stream) const {
  check_caller();
  const auto current = context_scope::any(contexts_);
  const stream_capture found = query_capture(api_, stream);
  if (found.status != CU_STREAM_CAPTURE_STATUS_ACTIVE) return {};
  std::vector<graph_node> nodes(found.frontier_size);
  std::transform(found.frontier, found.frontier + found.frontier_size, nodes.begin(), node_of);
  return nodes;
}

std::vector<graph_node> cuda_driver::graph_dependencies(graph_node node) const {
  check_caller();
  if (node == graph_node{}) throw invalid_argument("the graph node is null");
  auto* const native = reinterpret_cast<CUgraphNode>(static_cast<std::uintptr_t>(node));
  const auto doing = [] { return "ask what a graph node depends on"; };
  std::size_t count = 0;
  check(api_, api_.graph_node_get_dependencies(native, nullptr, nullptr, &count), doing);
  if (count == 0) return {};
  std::vector<CUgraphNode> before(count);
  std::vector<CUgraphEdgeData> edges(count);
  check(api_, api_.graph_node_get_dependencies(native, before.data(), edges.data(), &count), doing);
  before.resize(std::min(count, before.size()));
  std::vector<graph_node> nodes(before.size());
  std::transform(before.begin(), before.end(), nodes.begin(), node_of);
  return nodes;
}

}  // namespace evmm
