// SPDX-License-Identifier: Apache-2.0
// A program of a user: exits with 0 when the installed library did what it should.
#include <evmm/error.hpp>
#include <evmm/types.hpp>
#include <evmm/units.hpp>
#include <evmm/version.hpp>

#include <cstdio>
#include <exception>

using namespace evmm::units;

namespace {

void check(bool holds, const char* what) {
  if (!holds) throw evmm::driver_error(what);
}

// An error thrown inside a shared library must be caught by its class outside.
void check_errors() {
  try {
    evmm::throw_error(evmm::error_category::out_of_memory, {.message = "on purpose"});
  } catch (const evmm::out_of_memory& caught) {
    check(caught.message() == "on purpose", "the error lost its message");
    return;
  }
  check(false, "throw_error did not throw");
}

}  // namespace

int main() {
  try {
    check_errors();
    check(evmm::to_string(evmm::tier::device) == "DEVICE", "to_string(tier)");
    std::printf("evmm %s works\n", EVMM_VERSION);
    return 0;
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "consumer: %s\n", failure.what());
    return 1;
  }
}
