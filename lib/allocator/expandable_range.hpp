// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/allocator/arena.hpp"
#include "lib/allocator/pool_record.hpp"
#include "lib/allocator/segment_records.hpp"
#include "lib/memory/copier.hpp"
#include "lib/memory/memory_source.hpp"

#include <evmm/address_range.hpp>
#include <evmm/mapping.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace [[gnu::visibility("default")]] evmm {

struct span_record;

/// One physical handle, and everywhere it is mapped.
///
/// A handle may be mapped at several addresses, of which one is its home: the only one whose
/// blocks may be handed out. Moving the home costs no driver call when the new place is mapped
/// already, and nothing needs to be unmapped under running work.
struct handle_record {
  memory_ptr memory;
  std::uint64_t serial = 0;  ///< tells it from every other handle of the allocator
  span_record* home = nullptr;
  std::shared_ptr<const call_stack> stack = {};  ///< of its last move home, when that is recorded
  std::vector<std::unique_ptr<span_record>> spans = {};
  // During one search, for handles that no live block touches:
  arena* giver = nullptr;  ///< whose free block the home lies in; null when it is not free
  std::uint32_t freed_at = 0;
  bool needs_wait = false;  ///< its last use, on another stream, is not over

  std::size_t bytes() const noexcept { return memory->size(); }
  tier where() const noexcept { return memory->location().kind; }
};

/// One mapping of a handle, in some range.
struct span_record {
  handle_record& what;
  expandable_range& in;
  mapping mapped;
  /// Set while it is not the home: behind the last work that used these addresses.
  std::optional<scoped_event> last_use = {};
  const block* near = nullptr;  ///< where to look for the block it lies in

  span_record(handle_record& of, expandable_range& range, mapping made)
      : what(of), in(range), mapped(std::move(made)) {}
  address at() const noexcept { return mapped.base(); }
  std::size_t bytes() const noexcept { return mapped.size(); }
  address end() const noexcept { return at() + bytes(); }
  bool home() const noexcept { return what.home == this; }
};

/// Addresses that one arena fills with handles as it needs them.
/// Threads: under the allocator's slow lock; `segment` also under the arena's.
class expandable_range {
  segment_records::lease record_;

 public:
  expandable_range(segment_records::lease record, driver& on, std::size_t reserve,
                   std::size_t granule, tier where)
      : record_(std::move(record)),
        granule_(granule),
        where_(where),
        addresses_(on, reserve, granule) {
    segment.base = addresses_.base();
    segment.bytes = addresses_.size();
    segment.range = this;
  }

  address base() const noexcept { return addresses_.base(); }
  address end() const noexcept { return addresses_.base() + addresses_.size(); }
  std::size_t granule() const noexcept { return granule_; }
  /// What backs it; both tiers where the pool lets its allocations span them.
  bool takes(tier kind) const noexcept {
    return kind == where_ || segment.owner->pool().options.may_span;
  }
  address round_down(address at) const noexcept {
    return base() + (at - base()) / granule_ * granule_;
  }
  address round_up(address at) const noexcept { return round_down(at + granule_ - 1); }

  /// The mapping at `at`; null when there is none.
  span_record* span_at(address at) const noexcept {
    const std::size_t i = (at - base()) / granule_;
    return i < by_granule_.size() ? by_granule_[i] : nullptr;
  }
  /// Beyond this nothing was ever mapped.
  address mapped_end() const noexcept { return base() + by_granule_.size() * granule_; }
  /// Room to note mappings up to `end`, so that set() cannot fail.
  void reserve(address up_to) {
    const std::size_t wanted = (up_to - base() + granule_ - 1) / granule_;
    if (by_granule_.size() < wanted) by_granule_.resize(wanted);
  }
  void set(address at, std::size_t bytes, span_record* span) noexcept {
    const std::size_t first = (at - base()) / granule_;
    for (std::size_t i = 0; i < bytes / granule_; ++i) by_granule_[first + i] = span;
  }
  /// Bytes whose mapping is its handle's home.
  std::size_t backed_bytes() const noexcept {
    std::size_t bytes = 0;
    for (const span_record* span : by_granule_)
      bytes += span != nullptr && span->home() ? granule_ : 0;
    return bytes;
  }

  /// How many handles have their home here.
  std::int64_t backed_handles() const noexcept {
    std::int64_t count = 0;
    for (std::size_t i = 0; i < by_granule_.size(); ++i) {
      const span_record* const span = by_granule_[i];
      count += span != nullptr && span->home() && span->at() == base() + i * granule_ ? 1 : 0;
    }
    return count;
  }

  segment_record& segment = *record_;

 private:
  std::size_t granule_;
  tier where_;
  address_range addresses_;
  std::vector<span_record*> by_granule_;
};

}  // namespace evmm
