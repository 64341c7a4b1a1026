// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <functional>
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

}  // namespace evmm::test
