// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/allocator/options_grammar.hpp"

#include <evmm/allocator/options.hpp>

#include <cstddef>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace [[gnu::visibility("default")]] evmm {

/// One value of the configuration string, with what an error needs to say about it. Its readers
/// throw invalid_argument naming key, position, value and what is allowed.
class option_value {
 public:
  option_value(const option_entry& entry, std::string_view allowed)
      : entry_(entry), allowed_(allowed) {}

  bool truth() const;
  /// Digits are counts of `unit` bytes unless they end in B, K, M, G or T.
  std::size_t size(std::size_t unit) const;
  std::size_t size_above_0(std::size_t unit) const;
  double number() const;
  double number_above(double least) const;
  unsigned count() const;
  /// One of `names`, by its index.
  std::size_t one_of(const std::vector<std::string_view>& names) const;
  reservation reserve() const;
  std::map<std::string, reservation> reserve_by_class() const;
  std::vector<rounding_step> rounding() const;
  std::vector<device_id> devices() const;
  host_placement placement() const;

 private:
  [[noreturn]] void refuse(const option_word& what) const;
  const option_word& word() const;
  const std::vector<option_item>& list() const;
  reservation reserve(const option_word& from) const;
  int ordinal(const option_item& from) const;

  const option_entry& entry_;
  std::string_view allowed_;
};

/// The texts that the readers above read back.
std::string write_truth(bool value);
/// Digits alone when `bytes` is a multiple of `unit`.
std::string write_size(std::size_t bytes, std::size_t unit);
std::string write_number(double value);
std::string write_reserve(const reservation& value);
std::string write_reserve_by_class(const std::map<std::string, reservation>& values);
std::string write_rounding(const std::vector<rounding_step>& steps);
std::string write_devices(const std::vector<device_id>& devices);
std::string write_placement(const host_placement& value);

}  // namespace evmm
