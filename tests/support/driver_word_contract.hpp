// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/driver_contract.hpp"

#include <cstdint>
#include <thread>
#include <vector>

// Words that streams store and wait for: the signals of everything that is ordered by streams.

namespace evmm::test {

/// Each test leaves no stream waiting: nothing but a store would ever end that.
class driver_word_contract : public driver_contract {
 protected:
  std::uint64_t word_at(address at) {
    std::uint64_t word = 0;
    on->copy(reinterpret_cast<address>(&word), at, sizeof word, nullptr);
    on->synchronize(native_stream{nullptr});
    return word;
  }
  void zero(address at) {
    on->fill(at, std::byte{0}, granule, nullptr);
    on->synchronize(native_stream{nullptr});
  }
};

TEST_P(driver_word_contract, a_word_is_stored_in_stream_order) {
  const scoped_stream stream(*on);
  for (const auto where : tiers) {
    const auto memory = make(where, granule);
    on->fill(memory.base(), std::byte{1}, granule, stream);
    on->store_word(memory.base() + 8, 0x1234'5678'9abc'def0, stream);
    on->synchronize(stream);
    EXPECT_EQ(word_at(memory.base() + 8), 0x1234'5678'9abc'def0u) << to_string(where);
    EXPECT_EQ(word_at(memory.base()), 0x0101'0101'0101'0101u) << to_string(where);
    EXPECT_EQ(word_at(memory.base() + 16), 0x0101'0101'0101'0101u) << to_string(where);
  }
}

TEST_P(driver_word_contract, a_stream_waits_until_another_stores_and_sees_what_came_before) {
  const scoped_stream producer(*on);
  const scoped_stream consumer(*on);
  for (const auto where : tiers) {
    const auto words = make(where, granule);
    const auto data = make(device, 2 * granule);
    zero(words.base());
    on->wait_word(words.base() + 64, 7, consumer);
    on->copy(data.base() + granule, data.base(), granule, consumer);
    EXPECT_FALSE(on->idle(consumer));
    on->store_word(words.base() + 64, 6, producer);
    on->synchronize(producer);
    EXPECT_FALSE(on->idle(consumer)) << "6 is less than 7";
    on->fill(data.base(), std::byte{0x5a}, granule, producer);
    on->store_word(words.base() + 64, 8, producer);
    on->synchronize(consumer);
    EXPECT_EQ(read(data.base() + granule, granule),
              std::vector<std::byte>(granule, std::byte{0x5a}))
        << to_string(where);
  }
}

TEST_P(driver_word_contract, what_was_reached_is_not_waited_for) {
  const scoped_stream stream(*on);
  const auto memory = make(device, granule);
  on->store_word(memory.base(), 5, stream);
  for (const std::uint64_t least : {0, 1, 5}) on->wait_word(memory.base(), least, stream);
  on->synchronize(stream);
  // The difference counts, so that a counter may pass its end.
  on->store_word(memory.base(), 3, stream);
  on->wait_word(memory.base(), ~std::uint64_t{0}, stream);
  on->synchronize(stream);
}

TEST_P(driver_word_contract, the_cpu_and_streams_signal_through_pinned_memory) {
  const scoped_stream stream(*on);
  const address at = on->allocate_pinned(4096);
  auto* const words = reinterpret_cast<std::uint64_t*>(at);
  words[0] = words[1] = 0;
  on->store_word(at, 1, stream);
  on->wait_word(at + 8, 1, stream);
  on->store_word(at, 2, stream);
  while (__atomic_load_n(&words[0], __ATOMIC_ACQUIRE) != 1) std::this_thread::yield();
  EXPECT_FALSE(on->idle(stream));
  __atomic_store_n(&words[1], 1, __ATOMIC_RELEASE);
  on->synchronize(stream);
  EXPECT_EQ(words[0], 2u);
  on->free_pinned(at);
}

TEST_P(driver_word_contract, a_word_lies_at_a_multiple_of_eight) {
  const scoped_stream stream(*on);
  const auto memory = make(device, granule);
  EXPECT_THROW(on->store_word(memory.base() + 4, 1, stream), invalid_argument);
  EXPECT_THROW(on->wait_word(memory.base() + 1, 1, stream), invalid_argument);
  EXPECT_THROW(on->store_word(0, 1, stream), invalid_argument);
  EXPECT_THROW(on->wait_word(0, 1, stream), invalid_argument);
}

}  // namespace evmm::test
