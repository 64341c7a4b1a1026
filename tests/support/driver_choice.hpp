// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/driver.hpp>

#include <functional>
#include <memory>
#include <ostream>
#include <string>

namespace evmm::test {

/// Makes the driver to test; null when there is none, with the reason.
struct driver_choice {
  std::string name;
  std::function<std::shared_ptr<driver>(std::string* why_not)> make;
  friend void PrintTo(const driver_choice& choice, std::ostream* out) { *out << choice.name; }
};

}  // namespace evmm::test
