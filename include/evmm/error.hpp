// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <source_location>
#include <stdexcept>
#include <string>
#include <utility>

namespace [[gnu::visibility("default")]] evmm {

/// What kind of failure it was; one class below `error` for each.
enum class error_category : std::uint8_t {
  invalid_argument,  ///< the call was wrong; nothing was done
  out_of_memory,     ///< a tier cannot give what was asked; nothing was done
  driver_error,      ///< the CUDA driver or the operating system refused
  peer_error,        ///< another rank failed, left, or disagrees
  unsupported,       ///< this machine, driver or build cannot do it
  timed_out,         ///< a blocking step passed its deadline
};

/// "invalid_argument" and so on.
const char* to_string(error_category category) noexcept;

/// The parts of an error. `what()` joins them into one line:
/// `out_of_memory: cannot create 512.0 MiB on DEVICE 0: 300.0 MiB of 1.0 GiB free; help: ...`.
struct error_info {
  std::string message;    ///< what was asked and what stood in the way, with values and limits
  std::string help = {};  ///< the option or action that would help; empty when there is none
  int native_code = 0;    ///< CUresult, errno or ncclResult_t; 0 when none applies
  std::source_location where = std::source_location::current();
};

/// Base of everything evmm throws on purpose.
class error : public std::runtime_error {
 public:
  error(error_category category, error_info info);

  error_category category() const noexcept { return category_; }
  /// CUresult, errno or ncclResult_t of the call that failed, 0 when the failure was not a call's.
  int native_code() const noexcept { return info_.native_code; }
  const std::string& message() const noexcept { return info_.message; }
  const std::string& help() const noexcept { return info_.help; }
  const std::source_location& where() const noexcept { return info_.where; }

 private:
  error_category category_;
  error_info info_;
};

/// The category as a type, so that `catch (const out_of_memory&)` reads as it should.
template <error_category Category>
class categorized_error : public error {
 public:
  explicit categorized_error(error_info info) : error(Category, std::move(info)) {}
  explicit categorized_error(std::string message, std::string help = {}, int native_code = 0,
                             std::source_location where = std::source_location::current())
      : error(Category, {std::move(message), std::move(help), native_code, where}) {}
};

using invalid_argument = categorized_error<error_category::invalid_argument>;
using out_of_memory = categorized_error<error_category::out_of_memory>;
using driver_error = categorized_error<error_category::driver_error>;
using peer_error = categorized_error<error_category::peer_error>;
using unsupported = categorized_error<error_category::unsupported>;
using timed_out = categorized_error<error_category::timed_out>;

/// Throws the class that belongs to `category`: how an error crosses from one rank to another.
[[noreturn]] void throw_error(error_category category, error_info info);

}  // namespace evmm
