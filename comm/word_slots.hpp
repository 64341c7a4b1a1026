// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/driver.hpp>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace evmm {

/// Where a stream and a thread of the host tell each other how far they are: the stream stores and
/// waits in its order, the thread looks and stores. Values only grow, so that a slot can be used
/// again as soon as the stream has passed it.
struct word_slot {
  std::uint64_t reached = 0;   ///< by the stream
  std::uint64_t released = 0;  ///< by the thread; the stream waits for it
  std::uint64_t passed = 0;    ///< by the stream, and it touches the slot no more
};

inline address address_of(const std::uint64_t& word) {
  return reinterpret_cast<address>(&word);
}
inline std::uint64_t load_word(const std::uint64_t& word) {
  return __atomic_load_n(&word, __ATOMIC_ACQUIRE);
}
inline void store_word(std::uint64_t& word, std::uint64_t value) {
  __atomic_store_n(&word, value, __ATOMIC_RELEASE);
}

/// Slots in page-locked memory, as many as are needed at a time. Thread-safe.
class word_slots {
 public:
  explicit word_slots(driver& on) : on_(on) {}
  word_slots(const word_slots&) = delete;
  word_slots& operator=(const word_slots&) = delete;
  /// Slots that were not given back may still be touched by a stream: their pages are left.
  ~word_slots();

  word_slot& take();
  void give(word_slot& slot) noexcept;

 private:
  driver& on_;
  std::mutex mutex_;
  std::vector<address> pages_;
  std::vector<word_slot*> free_;
  std::size_t made_ = 0;
};

}  // namespace evmm
