// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/allocator/block.hpp"
#include "lib/allocator/block_table.hpp"
#include "lib/allocator/deferred_frees.hpp"
#include "lib/allocator/free_index.hpp"
#include "lib/allocator/ledger.hpp"
#include "lib/allocator/size_rules.hpp"
#include "lib/allocator/spin_lock.hpp"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace [[gnu::visibility("default")]] evmm {

class expandable_range;
class fixed_memory;
struct pool_record;

/// A run of addresses that an arena cuts into blocks.
struct segment_record {
  address base = 0;
  std::size_t bytes = 0;
  arena* owner = nullptr;
  block* first = nullptr;
  expandable_range* range = nullptr;  ///< one of the two is set
  fixed_memory* memory = nullptr;
  bool expandable() const noexcept { return range != nullptr; }
};

/// The blocks of one pool, stream and size class: splitting, merging, best fit.
///
/// A freed block first becomes `recent`: found again by its exact size, without touching its
/// neighbours or any index. Small ones are merged when nothing fits or when many have gathered:
/// they are many, and what they waste is little. Of large ones the last alone is recent, and is
/// merged when it is not wanted again at once: others would settle where they do not fit best.
///
/// The best fit is sought among the runs of free addresses, holes included, so that where a block
/// lies depends little on where memory happens to be: a program that repeats itself finds its
/// places again, and the memory that was mapped there.
///
/// Threads: everything is under guard(), except what is const from construction on.
class alignas(128) arena {
 public:
  /// `clock` ticks with the allocator's slow requests and dates free blocks.
  /// `account` is shared by the two arenas of a pool and stream, and so is its lock.
  arena(pool_record& pool, native_stream stream, size_class kind, ledger_account& account,
        const size_rules& rules, const std::atomic<std::uint64_t>& clock);
  arena(const arena&) = delete;
  arena& operator=(const arena&) = delete;

  pool_record& pool() const noexcept { return pool_; }
  native_stream stream() const noexcept { return stream_; }
  size_class kind() const noexcept { return kind_; }
  spin_lock& guard() const noexcept { return account_.guard(); }

  // --- requests (under guard()) ---------------------------------------------------------------

  /// A live block of `bytes` that was freed a moment ago; null when there is none.
  block* take_recent(std::size_t bytes) noexcept {
    block* found = last_;
    if (kind_ == size_class::large) {
      if (found == nullptr || found->bytes != bytes) return nullptr;
      last_ = nullptr;
    } else {
      recent_list& list = recent_[slot_of(bytes)];
      found = list.head;
      if (list.bytes != bytes || found == nullptr) return nullptr;
      list.head = found->left;
    }
    --recent_count_;
    found->use = block_use::allocated;
    return found;
  }
  /// A free block in the smallest run that has one, split as the rules say; null when there is
  /// none. `whole` takes the block unsplit. Strong guarantee.
  block* take_free(std::size_t bytes, bool whole);
  /// [at, at + bytes), out of a free block, with the rest of that where it is not split off; null
  /// when it is not free. `near` as for covering().
  block* take_at(address at, std::size_t bytes, const block* near = nullptr);
  /// The same without any rest.
  block* take_exactly(address at, std::size_t bytes);
  /// A live or pending block is over: it becomes recent.
  void put(block* freed) noexcept {
    freed->use = block_use::recent;
    freed->requested = 0;
    freed->freed_at = now();
    if (kind_ == size_class::large) {
      if (last_ != nullptr) merge_recent();
      last_ = freed;
    } else {
      if (recent_count_ >= most_recent) merge_recent();
      const std::size_t slot = slot_of(freed->bytes);
      recent_list& list = recent_[slot];
      recent_used_ |= std::uint64_t{1} << slot;
      if (list.bytes != freed->bytes) {
        if (list.head != nullptr) merge(list);
        list.bytes = freed->bytes;
      }
      freed->left = list.head;
      list.head = freed;
    }
    ++recent_count_;
  }
  /// Merges every recent block with its free neighbours.
  void merge_recent() noexcept;
  block* find(address at) const noexcept { return table_.find(at); }
  /// The block that `at` lies in, sought from `near`, which may have been a block of this arena and
  /// be none any more; null when `at` lies in no segment.
  block* covering(address at, const block* near = nullptr) const noexcept;

  // --- memory (under guard()) -----------------------------------------------------------------

  /// Room for the records of `more` blocks, so that what follows cannot fail.
  void reserve(std::size_t more) {
    if (spare_count_ < more || !table_.has_room(more)) make_room(more);
  }
  /// A new segment is one free block, or one hole. Needs reserve(1).
  void add(segment_record& segment, block_use as) noexcept;
  /// Whether the segment is one free block.
  bool unused(const segment_record& segment) const noexcept {
    return segment.first->use == block_use::free && segment.first->after == nullptr;
  }
  /// Takes out a segment that is one free block or one hole.
  void remove(segment_record& segment) noexcept;
  /// Memory has come behind [at, at + bytes), which lies in a hole. Needs reserve(2).
  void back(block* hole, address at, std::size_t bytes) noexcept;
  /// The memory of [at, at + bytes), which lies in a free block, is gone. Needs reserve(2).
  void strip(block* free, address at, std::size_t bytes) noexcept;

  /// Takes [at, at + bytes), which lies in a free block, out of its run. Needs reserve(2).
  block* occupy(block* free, address at, std::size_t bytes, block_use as) noexcept {
    return occupy(first_of_run(free), free, at, bytes, as);
  }
  /// A block becomes free or a hole and joins the run of its free neighbours.
  void vacate(block* freed, block_use as) noexcept;

  const free_index& runs() const noexcept { return runs_; }
  /// Calls `visit(block*)` for each free block of at least `bytes`, in no useful order.
  template <class Visit>
  void for_each_free(std::size_t bytes, Visit&& visit) const {
    runs_.visit_until(bytes, [&](block* first) {
      for (block* part = first; part != nullptr && part->vacant(); part = part->after) {
        if (part->use == block_use::free && part->bytes >= bytes) visit(part);
      }
      return false;
    });
  }
  /// Of free blocks, recent ones left out.
  std::size_t free_bytes() const noexcept { return free_bytes_; }
  std::size_t recent_count() const noexcept { return recent_count_; }
  /// Nothing live, pending or free: its stream need not exist.
  bool empty() const noexcept {
    return free_bytes_ == 0 && recent_count_ == 0 && allocated_count() == 0 &&
           (deferred == nullptr || deferred->empty());
  }

  /// It has no memory and never will: lets go of what only blocks need.
  void retire() noexcept;

  ledger_account& account() const noexcept { return account_; }
  std::int64_t allocated_count() const noexcept { return account_.allocated_count(kind_); }
  std::int64_t allocated_bytes() const noexcept { return account_.allocated_bytes(kind_); }

  std::vector<segment_record*> segments;     ///< under the allocator's lock as well
  std::unique_ptr<deferred_frees> deferred;  ///< under guard(); null until one is

 private:
  struct recent_list {
    std::size_t bytes = 0;
    block* head = nullptr;
  };
  static constexpr int recent_bits = 6;
  static constexpr std::size_t most_recent = 512;
  static std::size_t slot_of(std::size_t bytes) noexcept {
    return static_cast<std::size_t>(((bytes >> 9) * 0x9e3779b97f4a7c15u) >> (64 - recent_bits));
  }

  std::uint32_t now() const noexcept {
    return static_cast<std::uint32_t>(clock_.load(std::memory_order_relaxed));
  }
  void make_room(std::size_t more);
  /// The free block that [at, at + bytes) lies in, ready to be cut; null when it is not free.
  block* free_at(address at, std::size_t bytes, const block* near);
  block* new_record() noexcept;
  void drop_record(block* gone) noexcept;
  /// Cuts `bytes` off the front of a block; returns the rest, of the same use.
  block* cut(block* whole, std::size_t bytes) noexcept;
  /// Takes `next` into `first`, its neighbour.
  void join(block* first, block* next) noexcept;
  /// Joins a vacant block with neighbours of its use; returns the whole.
  block* join_alike(block* one) noexcept;
  /// [at, at + bytes) of a block as a block of its own, of the same use.
  block* part_of(block* whole, address at, std::size_t bytes) noexcept;
  void merge(recent_list& list) noexcept;
  static block* first_of_run(block* part) noexcept {
    while (part->before != nullptr && part->before->vacant()) part = part->before;
    return part;
  }
  /// occupy() where the run is known.
  block* occupy(block* first, block* free, address at, std::size_t bytes, block_use as) noexcept;
  /// Bytes of the largest free block of a run.
  static std::size_t largest_free(const block* run) noexcept;
  void insert_run(block* first, std::size_t bytes, std::size_t largest) noexcept;
  /// Memory has come or gone in the run that `part` lies in.
  void memory_changed(block* part) noexcept;

  size_class kind_;
  block* last_ = nullptr;  ///< large: the recent block
  std::size_t recent_count_ = 0;
  std::uint64_t recent_used_ = 0;  ///< small: which lists may have blocks
  std::array<recent_list, std::size_t{1} << recent_bits> recent_{};
  ledger_account& account_;
  block_table table_;
  free_index runs_;
  std::size_t free_bytes_ = 0;
  block* spare_ = nullptr;  ///< records without a block, by `left`
  std::size_t spare_count_ = 0;
  std::vector<std::unique_ptr<block[]>> records_;

  pool_record& pool_;
  native_stream stream_;
  const size_rules& rules_;
  const std::atomic<std::uint64_t>& clock_;
};

}  // namespace evmm
