// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/comm/bootstrap.hpp>

#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace evmm::test {

/// Runs `body` once a rank, each in its own thread, and returns what each threw (null for nothing).
inline std::vector<std::exception_ptr> run_ranks(int size, const std::function<void(int)>& body) {
  std::vector<std::exception_ptr> thrown(static_cast<std::size_t>(size));
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          body(rank);
        } catch (...) {
          thrown[static_cast<std::size_t>(rank)] = std::current_exception();
        }
      });
    }
  }
  return thrown;
}

/// What an exception says; empty for null.
inline std::string what(const std::exception_ptr& thrown) {
  if (thrown == nullptr) return {};
  try {
    std::rethrow_exception(thrown);
  } catch (const std::exception& failure) {
    return failure.what();
  } catch (...) {
    return "unknown exception";
  }
}

/// What calling `body` throws; empty when it throws nothing. The error's class leads the text.
template <class Body>
std::string thrown_by(Body&& body) {
  try {
    body();
  } catch (...) {
    return what(std::current_exception());
  }
  return {};
}

/// That all ranks have the same text.
inline void expect_same_text(bootstrap& ranks, const std::string& mine) {
  for (const auto& other : ranks.all_gather(std::as_bytes(std::span{mine}), "test: same text")) {
    EXPECT_EQ(std::string(reinterpret_cast<const char*>(other.data()), other.size()), mine);
  }
}

/// What `call` throws: the same text on every rank.
inline std::string thrown_by_all(bootstrap& ranks, const std::function<void()>& call) {
  std::string said = thrown_by(call);
  expect_same_text(ranks, said);
  return said;
}

}  // namespace evmm::test
