// SPDX-License-Identifier: Apache-2.0
#include "lib/memory/part.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <iterator>
#include <stdexcept>
#include <utility>

namespace evmm {

part_segment& part::at(std::size_t index) const {
  if (index >= segments_.size()) {
    throw invalid_argument(
        fmt::format("there is no segment {}: the region has {}", index, segments_.size()),
        "segments() lists them");
  }
  return *segments_[index];
}

std::vector<std::size_t> part::sizes() const {
  std::vector<std::size_t> sizes;
  for (const auto& held : segments_) sizes.push_back(held->place.bytes);
  return sizes;
}

std::vector<segment> part::describe() const {
  std::vector<segment> described;
  for (const auto& held : segments_) {
    described.push_back(
        {.offset = offset_of(*held),
         .bytes = held->place.bytes,
         .where = held->where,
         .state = held->discarded ? segment_state::discarded : segment_state::mapped});
  }
  return described;
}

std::unique_ptr<part_segment> part::make(std::size_t offset, std::size_t bytes,
                                         memory_location where) const {
  auto made = std::make_unique<part_segment>();
  made->place.at = base_ + offset;
  made->place.bytes = bytes;
  made->where = where;
  return made;
}

std::vector<std::unique_ptr<part_segment>> part::pop(std::size_t count) {
  std::vector<std::unique_ptr<part_segment>> taken;
  taken.reserve(count);
  const auto first = segments_.end() - static_cast<std::ptrdiff_t>(count);
  std::move(first, segments_.end(), std::back_inserter(taken));
  segments_.erase(first, segments_.end());
  for (const auto& gone : taken) size_ -= gone->place.bytes;
  return taken;
}

void part::push_all(std::vector<std::unique_ptr<part_segment>> segments) noexcept {
  for (auto& segment : segments) {
    size_ += segment->place.bytes;
    segments_.push_back(std::move(segment));
  }
}

void part::merge(std::size_t first, std::size_t count,
                 std::unique_ptr<part_segment> merged) noexcept {
  const auto at = segments_.begin() + static_cast<std::ptrdiff_t>(first);
  *at = std::move(merged);
  segments_.erase(at + 1, at + static_cast<std::ptrdiff_t>(count));
}

std::size_t part::mapped_bytes(tier kind) const noexcept {
  std::size_t bytes = 0;
  for (const auto& held : segments_) {
    if (!held->discarded && held->where.kind == kind) bytes += held->place.bytes;
  }
  return bytes;
}

std::size_t part::discarded_bytes() const noexcept {
  return size_ - mapped_bytes(tier::device) - mapped_bytes(tier::host);
}

std::size_t part::backup_bytes() const noexcept {
  std::size_t bytes = 0;
  for (const auto& held : segments_) {
    if (held->backup) bytes += held->backup->size();
  }
  return bytes;
}

void part::check() const {
  address expected = base_;
  for (const auto& held : segments_) {
    const bool mapped = held->place.mapped.has_value() && held->place.memory != nullptr;
    if (held->place.at != expected || mapped == held->discarded ||
        (mapped && held->place.memory->location() != held->where)) {
      throw std::logic_error(fmt::format(
          "segment at {:#x} of the part at {:#x} contradicts itself: expected at {:#x}, "
          "discarded {}, mapped {}",
          held->place.at, base_, expected, held->discarded, mapped));
    }
    expected += held->place.bytes;
  }
  if (expected != base_ + size_) throw std::logic_error("a part's size is not its segments'");
}

index_range clip(std::size_t first, std::size_t count, std::size_t segments) {
  if (first > segments) {
    throw invalid_argument(
        fmt::format("there is no segment {}: the region has {}", first, segments),
        "segments() lists them");
  }
  return {first, count > segments - first ? segments : first + count};
}

}  // namespace evmm
