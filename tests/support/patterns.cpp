// SPDX-License-Identifier: Apache-2.0
#include "tests/support/patterns.hpp"

#include <cstring>
#include <vector>

namespace evmm::test {

namespace {

std::vector<std::uint64_t> pattern(std::size_t bytes, std::uint64_t seed) {
  std::vector<std::uint64_t> words((bytes + 7) / 8);
  for (std::size_t i = 0; i < words.size(); ++i) {
    words[i] = (seed * 0x9e3779b97f4a7c15u) ^ (i * 0xd1342543de82ef95u);
  }
  return words;
}

class blocking_stream {
 public:
  blocking_stream(driver& on, device_id device) : on_(on), stream_(on.create_stream(device)) {}
  ~blocking_stream() { on_.destroy_stream(stream_); }
  void copy(address to, address from, std::size_t bytes) {
    on_.copy(to, from, bytes, stream_);
    on_.synchronize(stream_);
  }

 private:
  driver& on_;
  native_stream stream_;
};

}  // namespace

void write_pattern(driver& on, address at, std::size_t bytes, std::uint64_t seed,
                   device_id device) {
  const auto words = pattern(bytes, seed);
  blocking_stream(on, device).copy(at, reinterpret_cast<address>(words.data()), bytes);
}

bool holds_pattern(driver& on, address at, std::size_t bytes, std::uint64_t seed,
                   device_id device) {
  const auto expected = pattern(bytes, seed);
  std::vector<std::uint64_t> found(expected.size());
  blocking_stream(on, device).copy(reinterpret_cast<address>(found.data()), at, bytes);
  return std::memcmp(found.data(), expected.data(), bytes) == 0;
}

}  // namespace evmm::test
