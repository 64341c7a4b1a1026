// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <type_traits>

namespace [[gnu::visibility("default")]] evmm {

/// The calling thread's T, made when it is first asked for and destroyed with the thread. Other
/// thread-local objects may outlive it and still free memory: whoever asks then gets a new T, which
/// is not destroyed.
template <class T>
T& thread_object() noexcept {
  static_assert(std::is_nothrow_default_constructible_v<T>);
  static thread_local constinit bool made = false;
  alignas(T) static thread_local constinit std::byte place[sizeof(T)] = {};
  struct owner {
    ~owner() {
      made = false;
      std::destroy_at(std::launder(reinterpret_cast<T*>(place)));
    }
  };
  if (!made) {
    ::new (static_cast<void*>(place)) T();
    made = true;
    static thread_local const owner until_the_thread_ends;
    static_cast<void>(until_the_thread_ends);
  }
  return *std::launder(reinterpret_cast<T*>(place));
}

}  // namespace evmm
