// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/ep_reference.hpp"
#include "tests/support/symmetric_cases.hpp"

#include <evmm/comm/symmetric_buffer.hpp>
#include <evmm/ep/exchange.hpp>

#include <cstddef>
#include <vector>

namespace evmm::test {

/// What a rank has on its device to exchange: a heap, a stream, and the tokens of scripts.
class ep_tensors {
 public:
  ep_tensors(const ep_tensors&) = delete;
  ep_tensors& operator=(const ep_tensors&) = delete;

  int me() const { return at_.ranks->rank().value; }
  native_stream stream() const { return stream_; }

  /// The rank's tokens, as they are given.
  ep::tokens upload(const ep_script& script);

  template <class T>
  std::vector<T> get(const T* from, std::size_t count) {
    std::vector<T> all(count);
    if (count > 0) {
      copy(reinterpret_cast<address>(all.data()), reinterpret_cast<address>(from),
           count * sizeof(T));
    }
    return all;
  }
  template <class T, class U>
  void put(T* to, const std::vector<U>& all) {
    if (all.empty()) return;
    copy(reinterpret_cast<address>(to), reinterpret_cast<address>(all.data()),
         all.size() * sizeof(U));
  }

 protected:
  ep_tensors(const rank_context& at, const ep::exchange_options& options, std::size_t reserve,
             std::size_t growth_step);
  virtual ~ep_tensors();
  /// Before pageable memory is copied.
  virtual void settle() {}

  const rank_context& at_;
  symmetric_heap heap_;
  native_stream stream_;
  symmetric_buffer<std::byte> x_;
  symmetric_buffer<float> scales_, weights_;
  symmetric_buffer<std::int64_t> ids_;

 private:
  void copy(address to, address from, std::size_t bytes);
};

}  // namespace evmm::test
