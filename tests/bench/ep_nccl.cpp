// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/ep_nccl.hpp"

#include "comm/nccl_library.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <vector>

namespace evmm::bench {

namespace {

void check(int code, const char* call) {
  if (code == nccl_success) return;
  throw driver_error(fmt::format("{}: {}", call, load_nccl().api.error_string(code)), {}, code);
}

}  // namespace

nccl_exchange::nccl_exchange(const job& at, const ep_job& mine)
    : job_(mine),
      rank_(at.ranks->rank().value),  // Calls that return before NCCL has enqueued its work could
                                      // not be timed on a stream.
      on_(shared_communicator(at, {.blocking = true})) {
  const ep_routing& routing = mine.routing;
  const auto slots = routing.send_slots(rank_);
  tokens_ = cuda_array(routing.send_tokens(rank_));
  slots_ = cuda_array(slots);
  weights_ = cuda_array(std::vector<float>(slots.size(), 1.0f));
  const std::size_t sent = routing.sent(rank_);
  const std::size_t received = routing.received(rank_);
  const std::size_t scales = mine.scale_count() * sizeof(float);
  sent_ = cuda_array(sent * mine.row_bytes());
  sent_scales_ = cuda_array(sent * scales);
  received_ = cuda_array(received * mine.row_bytes());
  received_scales_ = cuda_array(received * scales);
  results_ = cuda_array(received * ep_job::combined_bytes());
  returned_ = cuda_array(sent * ep_job::combined_bytes());
  const std::size_t self = routing.sent_before(rank_, rank_);
  order_ = {.tokens = tokens_.at<std::int32_t>(),
            .slots = slots_.at<std::int32_t>(),
            .weights = weights_.at<float>(),
            .rows = static_cast<int>(sent),
            .count = static_cast<int>(routing.tokens()),
            .ranks = routing.ranks(),
            .self_begin = static_cast<int>(self),
            .self_end = static_cast<int>(self + routing.rows(rank_, rank_))};
}

void nccl_exchange::all_to_all(const void* from, void* to, std::size_t row_bytes, bool back,
                               native_stream stream) {
  const nccl_api& nccl = load_nccl().api;
  const ep_routing& routing = job_.routing;
  for (int peer = 0; peer < routing.ranks(); ++peer) {
    if (peer == rank_) continue;
    const std::size_t out = routing.rows(rank_, peer);
    const std::size_t in = routing.rows(peer, rank_);
    const std::size_t out_at = routing.sent_before(rank_, peer);
    const std::size_t in_at = routing.received_before(rank_, peer);
    const std::size_t sends = back ? in : out;
    const std::size_t receives = back ? out : in;
    if (sends > 0) {
      check(nccl.send(static_cast<const char*>(from) + (back ? in_at : out_at) * row_bytes,
                      sends * row_bytes, nccl_int8, peer, on_.get(), stream),
            "ncclSend");
    }
    if (receives > 0) {
      check(nccl.receive(static_cast<char*>(to) + (back ? out_at : in_at) * row_bytes,
                         receives * row_bytes, nccl_int8, peer, on_.get(), stream),
            "ncclRecv");
    }
  }
}

void nccl_exchange::dispatch(native_stream stream) {
  const std::size_t row = job_.row_bytes();
  const std::size_t scales = job_.scale_count() * sizeof(float);
  const std::size_t self = job_.routing.received_before(rank_, rank_);
  permute_rows(job_.x.local(), sent_.at(), received_.at(self * row), row, order_, stream);
  if (scales > 0) {
    permute_rows(job_.scales.local(), sent_scales_.at(), received_scales_.at(self * scales), scales,
                 order_, stream);
  }
  const nccl_api& nccl = load_nccl().api;
  check(nccl.group_start(), "ncclGroupStart");
  all_to_all(sent_.at(), received_.at(), row, false, stream);
  if (scales > 0) {
    all_to_all(sent_scales_.at(), received_scales_.at(), scales, false, stream);
  }
  check(nccl.group_end(), "ncclGroupEnd");
}

ep_rows nccl_exchange::received() const {
  return {.x = received_.at(), .scales = received_scales_.at<float>()};
}

void nccl_exchange::combine(native_stream stream) {
  const std::size_t row = ep_job::combined_bytes();
  const nccl_api& nccl = load_nccl().api;
  check(nccl.group_start(), "ncclGroupStart");
  all_to_all(results_.at(), returned_.at(), row, true, stream);
  check(nccl.group_end(), "ncclGroupEnd");
  const std::size_t self = job_.routing.received_before(rank_, rank_);
  reduce_rows(returned_.at(), results_.at(self * row), job_.out.local(), k_hidden, order_, stream);
}

std::string nccl_exchange::version() const {
  const int number = on_.version();
  return fmt::format("NCCL {}.{}.{}", number / 10000, number / 100 % 100, number % 100);
}

}  // namespace evmm::bench
