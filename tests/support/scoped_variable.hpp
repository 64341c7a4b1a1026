// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdlib>

namespace evmm::test {

/// A variable of the environment, for a scope.
class scoped_variable {
 public:
  scoped_variable(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  scoped_variable(const scoped_variable&) = delete;
  scoped_variable& operator=(const scoped_variable&) = delete;
  ~scoped_variable() { ::unsetenv(name_); }

 private:
  const char* name_;
};

}  // namespace evmm::test
