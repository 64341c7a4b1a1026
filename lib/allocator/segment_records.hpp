// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/allocator/arena.hpp"

#include <list>
#include <unordered_map>
#include <utility>

namespace [[gnu::visibility("default")]] evmm {

/// The records of an allocator's segments.
///
/// Whose an address is, is read before any lock is held, by whoever comes with a stale pointer too.
/// So a record stays allocated when its segment is gone, and is used again by the same arena alone:
/// `owner` never changes.
/// Threads: under the allocator's slow lock.
class segment_records {
  using records = std::list<segment_record>;

 public:
  /// The use of one record.
  class lease {
   public:
    lease(segment_records& from, records::iterator record) noexcept
        : from_(&from), record_(record) {}
    lease(lease&& other) noexcept
        : from_(std::exchange(other.from_, nullptr)), record_(other.record_) {}
    lease& operator=(lease&&) = delete;
    ~lease() {
      if (from_ != nullptr) from_->put_back(record_);
    }
    segment_record& operator*() const noexcept { return *record_; }

   private:
    segment_records* from_;
    records::iterator record_;
  };

  lease take(arena& owner) {
    records& idle = idle_[&owner];
    if (idle.empty()) idle.push_back({.owner = &owner});
    used_.splice(used_.begin(), idle, idle.begin());
    return {*this, used_.begin()};
  }

 private:
  void put_back(records::iterator record) noexcept {
    record->range = nullptr;
    record->memory = nullptr;
    records& idle = idle_.find(record->owner)->second;
    idle.splice(idle.begin(), used_, record);
  }

  records used_;
  std::unordered_map<const arena*, records> idle_;
};

}  // namespace evmm
