// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/memory/remap.hpp"
#include "lib/memory/segment_plan.hpp"

#include <evmm/region.hpp>

#include <cstddef>
#include <memory>
#include <string_view>
#include <vector>

namespace [[gnu::visibility("default")]] evmm {

/// One segment of one rank's part of a region.
struct part_segment {
  slot place;
  memory_location where = {};  ///< where it lies, or lay before it was discarded
  bool discarded = false;
  memory_ptr backup = {};  ///< contents of a discarded segment, not mapped
};

/// The segments of one rank's part, in order and without gaps.
class part {
 public:
  explicit part(address base) : base_(base) {}

  address base() const noexcept { return base_; }
  std::size_t size() const noexcept { return size_; }
  std::size_t count() const noexcept { return segments_.size(); }
  /// Throws invalid_argument when there is no such segment.
  part_segment& at(std::size_t index) const;
  std::size_t offset_of(const part_segment& segment) const noexcept {
    return segment.place.at - base_;
  }
  std::vector<std::size_t> sizes() const;
  std::vector<segment> describe() const;

  /// A segment in no list yet.
  std::unique_ptr<part_segment> make(std::size_t offset, std::size_t bytes,
                                     memory_location where) const;
  /// Makes room, so that appending cannot fail.
  void reserve(std::size_t more) { segments_.reserve(segments_.size() + more); }
  /// Takes the last `count` segments out of the list, first of them first.
  std::vector<std::unique_ptr<part_segment>> pop(std::size_t count);
  /// Appends segments, which begin where the last one ends.
  void push_all(std::vector<std::unique_ptr<part_segment>> segments) noexcept;
  /// Puts `merged` in the place of segments [first, first + count), whose bytes it covers.
  void merge(std::size_t first, std::size_t count, std::unique_ptr<part_segment> merged) noexcept;

  /// Mapped bytes in one tier.
  std::size_t mapped_bytes(tier kind) const noexcept;
  std::size_t discarded_bytes() const noexcept;
  std::size_t backup_bytes() const noexcept;

  /// Throws std::logic_error when the list contradicts itself; for debug builds and tests.
  void check() const;

 private:
  address base_;
  std::size_t size_ = 0;
  std::vector<std::unique_ptr<part_segment>> segments_;
};

/// Indices [first, first + count) of `segments` ones, where a count past the end means all.
/// Throws invalid_argument when `first` is beyond the end.
struct index_range {
  std::size_t first, last;
};
index_range clip(std::size_t first, std::size_t count, std::size_t segments);

}  // namespace evmm
