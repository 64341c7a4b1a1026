// SPDX-License-Identifier: Apache-2.0
// A first read: one buffer that outgrows the device, and one of its segments moved, while its
// address and its contents stay. Runs on a GPU or, without one, on the host driver.
#include <evmm/driver.hpp>
#include <evmm/elastic_region.hpp>
#include <evmm/error.hpp>
#include <evmm/units.hpp>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <vector>

using namespace evmm::units;

namespace {

// Which memory is behind each part of the region.
void print_map(const evmm::elastic_region& region, const char* when) {
  std::printf("%-22s epoch %llu, %zu MiB at %p:", when,
              static_cast<unsigned long long>(region.epoch()), region.size() / 1_MiB,
              static_cast<void*>(region.data()));
  for (const evmm::segment& part : region.segments()) {
    std::printf("  [%zu MiB: %zu MiB %s]", part.offset / 1_MiB, part.bytes / 1_MiB,
                evmm::to_string(part.where).c_str());
  }
  std::printf("\n");
}

int run() {
  // CUDA when there is a GPU, else the host driver; EVMM_DRIVER=cuda|host insists.
  const auto driver = evmm::default_driver();
  const evmm::device_id device{0};

  // What the device part may take. A real GPU is too large to fill for a demonstration, so a small
  // budget plays the device; EVMM_HOST_DEVICE_BYTES=16M makes the emulated one as small.
  const std::size_t unit = driver->granularity(evmm::memory_location::on(device));
  const std::size_t budget = std::min(std::max(16_MiB, 2 * unit),
                                      driver->usage(evmm::memory_location::on(device)).free_bytes);
  const std::size_t half = budget / 2 / unit * unit;

  // Reserving addresses costs nothing: take four times the budget.
  evmm::elastic_region region(driver, {.device = device, .reserve = 4 * budget});
  const std::byte* const address = region.data();

  // Grow: two segments on the device, then past it, behind the same consecutive addresses.
  region.grow(evmm::tier::device, half);
  region.grow(evmm::tier::device, half);
  print_map(region, "device is full");
  region.grow(evmm::tier::host, budget);
  print_map(region, "grown past it");

  // Fill all of it with one copy: a stream does not see where the tiers meet.
  std::vector<std::uint32_t> written(region.size() / sizeof(std::uint32_t));
  std::iota(written.begin(), written.end(), 1u);
  const evmm::native_stream stream = driver->create_stream(device);
  const auto at = reinterpret_cast<evmm::address>(region.data());
  driver->copy(at, reinterpret_cast<evmm::address>(written.data()), region.size(), stream);

  // Migrate the second segment to host memory. The copy above may still be running: name the
  // stream, and the region waits for it before it takes the old memory away.
  const evmm::native_stream streams[] = {stream};
  region.migrate(1, evmm::tier::host, {.streams = streams});
  print_map(region, "segment 1 migrated");

  // Read it back and compare.
  std::vector<std::uint32_t> read(written.size());
  driver->copy(reinterpret_cast<evmm::address>(read.data()), at, region.size(), stream);
  driver->synchronize(stream);
  driver->destroy_stream(stream);
  if (read != written || region.data() != address) {
    std::printf("FAILED: contents or address changed\n");
    return 1;
  }
  std::printf("verified: %zu bytes, %zu of them beyond a budget of %zu, at the same address\n",
              region.size(), region.size() - budget, budget);
  return 0;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const evmm::error& failure) {
    std::printf("FAILED: %s\n", failure.what());
    return 1;
  }
}
