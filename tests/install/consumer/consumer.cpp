// SPDX-License-Identifier: Apache-2.0
// A program of a user: exits with 0 when the installed library did what it should.
#include <evmm/elastic_region.hpp>
#include <evmm/error.hpp>
#include <evmm/host_driver.hpp>
#include <evmm/units.hpp>
#include <evmm/version.hpp>

#ifdef CONSUMER_HAS_COMM
#include <evmm/comm/bootstrap.hpp>
#include <evmm/comm/symmetric_region.hpp>
#endif

#include <cstdio>
#include <exception>

using namespace evmm::units;

namespace {

void check(bool holds, const char* what) {
  if (!holds) throw evmm::driver_error(what);
}

// An error thrown inside a shared library must be caught by its class outside.
void check_errors(const std::shared_ptr<evmm::driver>& driver) {
  try {
    evmm::elastic_region region(driver, {.reserve = 64_MiB});
    region.grow(evmm::tier::device, 128_MiB);
  } catch (const evmm::invalid_argument&) {
    return;
  }
  check(false, "a region grew beyond its reservation");
}

void check_region(const std::shared_ptr<evmm::driver>& driver) {
  evmm::elastic_region region(driver, {.reserve = 64_MiB});
  auto* const address = region.data();
  region.grow(evmm::tier::host, 2_MiB);
  region.data()[0] = std::byte{42};
  region.migrate(0, evmm::tier::device);
  check(region.data() == address && region.data()[0] == std::byte{42}, "migrate lost something");
}

#ifdef CONSUMER_HAS_COMM
void check_comm(const std::shared_ptr<evmm::driver>& driver) {
  const auto ranks = evmm::make_thread_bootstraps(1);
  evmm::symmetric_region region(ranks[0], driver, {.reserve = 64_MiB});
  region.grow(evmm::tier::host, 2_MiB);
  check(region.peer({0}) == region.local(), "a rank does not find itself");
  region.close();
}
#endif

}  // namespace

int main() {
  try {
    const auto driver = evmm::host_driver::make({});
    check_errors(driver);
    check_region(driver);
#ifdef CONSUMER_HAS_COMM
    check_comm(driver);
#endif
    // Links what chooses the driver too, with what it needs.
    std::printf("evmm %s works; default driver: %s\n", EVMM_VERSION,
                evmm::default_driver()->info().name.c_str());
    return 0;
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "consumer: %s\n", failure.what());
    return 1;
  }
}
