// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/allocator/arena.hpp"
#include "lib/allocator/expandable_range.hpp"
#include "lib/allocator/live_options.hpp"
#include "lib/allocator/page_map.hpp"
#include "lib/allocator/pool_record.hpp"
#include "lib/allocator/segment_records.hpp"
#include "lib/memory/memory_source.hpp"
#include "lib/memory/remap.hpp"

#include <evmm/allocator/statistics.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

namespace [[gnu::visibility("default")]] evmm {

/// Memory of one handle, or of a user's function, behind one segment.
class fixed_memory {
  segment_records::lease record_;

 public:
  fixed_memory(segment_records::lease record, driver& on, memory_ptr memory,
               const access_rule& access)
      : record_(std::move(record)),
        own_(std::make_unique<scratch_mapping>(on, *memory, access)),
        memory_(std::move(memory)) {
    segment.base = own_->base();
    segment.bytes = memory_->size();
    segment.memory = this;
  }
  /// `give_back` is called when it is destroyed.
  fixed_memory(segment_records::lease record, address at, std::size_t bytes,
               std::function<void()> give_back)
      : record_(std::move(record)), give_back_(std::move(give_back)) {
    segment.base = at;
    segment.bytes = bytes;
    segment.memory = this;
  }
  ~fixed_memory();
  fixed_memory(const fixed_memory&) = delete;
  fixed_memory& operator=(const fixed_memory&) = delete;

  tier where() const noexcept { return memory_ ? memory_->location().kind : tier::device; }
  const memory_ptr& memory() const noexcept { return memory_; }
  segment_record& segment = *record_;
  std::uint64_t serial = 0;                      ///< as handle_record::serial
  bool oversize = false;                         ///< counted so, whatever the options say now
  std::shared_ptr<const call_stack> stack = {};  ///< of its allocation, when that is recorded

 private:
  std::unique_ptr<scratch_mapping> own_;
  memory_ptr memory_;
  std::function<void()> give_back_;
};

/// What a request may cost.
struct supply_terms {
  tier where = tier::device;
  /// Held memory up to here is made rather than taken from elsewhere: the most that was ever live.
  std::size_t make_up_to = 0;
  bool growing = false;  ///< more will be live than ever before
  /// Held memory never passes this.
  std::size_t limit = 0;
  /// What is made serves although the rest cannot be: another tier adds it.
  bool in_parts = false;
  bool may_make = true;   ///< ask the driver for new memory
  bool may_wait = false;  ///< take what other streams have not finished with, behind a wait
};

/// The memory behind an allocator's blocks: makes handles, moves them between ranges, gives them
/// back.
///
/// New memory is made while less is held than was ever live. Beyond that, handles that no live
/// block touches are mapped where they are needed, so that fragmentation costs mappings, and in a
/// program that repeats itself not even those.
///
/// Threads: under the allocator's slow lock, which alone may hold several arenas' locks.
class memory_supply {
 public:
  /// Told of what comes and goes; returns the stack that it recorded, if it did.
  using listener = std::function<std::shared_ptr<const call_stack>(trace_action, const arena&,
                                                                   address, std::size_t)>;

  memory_supply(std::shared_ptr<driver> on, device_id device, const live_options& options,
                page_map& pages, listener tell);
  ~memory_supply();

  /// A free block of `bytes` in `needy`, whose lock is held, that needs no mapping: memory is
  /// behind it, or free and mapped there too. It lies in the smallest run that has one, and is live
  /// now; null when there is none.
  block* claim(arena& needy, std::size_t bytes);
  /// Puts memory behind enough free addresses of `needy`, which has no free block of `bytes`;
  /// returns a block [at, at + bytes) made live, with the arena locked by `held`, or null when
  /// memory has run out. `all` are the arenas that may give handles. No arena is locked while
  /// memory is made or mapped, and the caller holds none. Throws what the driver throws but
  /// out_of_memory.
  block* expand(arena& needy, std::size_t bytes, std::size_t reserve_bytes,
                std::span<arena* const> all, supply_terms terms, std::unique_lock<spin_lock>& held);
  /// A segment of one handle as a free block of `needy`, whose lock is held. False when memory has
  /// run out.
  bool add_segment(arena& needy, std::size_t bytes, const supply_terms& terms);

  /// Gives back up to `wanted` bytes of free memory of an arena, whose lock is held and whose
  /// stream is past all use of it; only what lies in `where`, if that is said, and was freed before
  /// `older_than`, and with `may_wait` also what other streams still use at other addresses.
  /// Returns the bytes.
  std::size_t give_back(arena& from, std::size_t wanted, std::optional<tier> where,
                        std::uint64_t older_than, bool may_wait);
  /// Gives back the handles of an arena, whose lock is held and whose stream is idle, that were
  /// made after `serial` and are free.
  void give_back_made(arena& of, std::uint64_t serial);
  std::uint64_t last_serial() const noexcept { return last_serial_; }
  /// What give_back could give.
  std::size_t releasable(arena& from) const;
  /// Lets go of addresses behind which an arena, whose lock is held, has no memory.
  void drop_unused_ranges(arena& of);
  /// The arena is going: unmaps and releases all it has. Nothing may be live in it.
  void drop(arena& gone) noexcept;

  void enable_peer(device_id peer);
  const std::vector<device_id>& peers() const noexcept { return peers_; }
  void fill(allocator_statistics& into) const;
  void reset_peaks() noexcept;
  void reset_totals() noexcept;
  std::size_t held_bytes(tier kind) const noexcept { return held_[static_cast<std::size_t>(kind)]; }
  std::vector<expandable_size> sizes() const;
  std::size_t granule() const noexcept { return granule_; }

 private:
  struct search;
  struct plan;
  enum class giving : std::uint8_t { nothing, at_once, after_wait };

  expandable_range& range_of(arena& needy, std::size_t bytes, std::size_t reserve_bytes,
                             tier where);
  giving ask(search& in, arena& giver);
  bool takable(search& in, handle_record& what);
  bool find_claim(search& in, block* run);
  void claim(search& in, span_record& span);
  void find_takable(search& in, std::span<arena* const> all, tier where);
  void choose_place(search& in, tier where) const;
  std::size_t new_handle_bytes(std::size_t held) const noexcept;
  std::size_t least_handle_bytes() const noexcept;
  bool plan_stretch(search& in, address from, address to, const supply_terms& terms, plan& to_do);
  bool plan_request(search& in, std::size_t reserve_bytes, std::span<arena* const> all,
                    const supply_terms& terms, plan& to_do);
  std::size_t room_for(std::size_t bytes);
  bool carry_out(plan& to_do, const supply_terms& terms);
  handle_record* pick(search& in, std::size_t most) const;
  handle_record* pick_to_exchange(search& in, std::size_t size) const;
  handle_record* make(std::size_t bytes, tier where, size_class kind);
  span_record* map(handle_record& what, expandable_range& in, address at);
  void unmap(span_record& gone) noexcept;
  /// Whether work may still use a mapping that is not its handle's home.
  bool in_use(span_record& stale) const;
  void wait_for_last_use(span_record& stale);
  /// What uses the home of a handle that is going to move is noted, or waited for by the stream
  /// of `needy`.
  void leave(handle_record& taken, arena& needy);
  /// `home`, in a hole of `needy`, which is locked, becomes its handle's home.
  void arrive(span_record& home, arena& needy, const block* near);
  /// The addresses of its home are a hole already.
  void release(handle_record& gone) noexcept;
  /// Its segment holds no block any more.
  void release(const arena& holder, fixed_memory& gone) noexcept;

  /// Refuses what a user's function should not have returned.
  void check_given(address at, std::size_t bytes, const pool_functions& by) const;
  void count(pool_statistic& of, size_class kind, std::int64_t amount) noexcept;
  void hold_in_pool(const arena& of, std::int64_t bytes) noexcept;
  void hold(size_class kind, tier where, std::int64_t bytes) noexcept;

  std::shared_ptr<driver> on_;
  device_id device_;
  const live_options& options_;
  page_map& pages_;
  listener tell_;
  memory_source source_;
  std::vector<device_id> peers_;
  access_rule access_;
  std::size_t granule_;

  segment_records records_;
  std::vector<std::unique_ptr<handle_record>> handles_;
  std::vector<std::unique_ptr<expandable_range>> ranges_;
  std::vector<std::unique_ptr<fixed_memory>> fixed_;

  pool_statistic segment_, reserved_bytes_;
  statistic oversize_segments_;
  std::size_t moved_bytes_ = 0;  ///< of all handles that were ever recycled
  std::int64_t made_ = 0, released_ = 0, recycled_ = 0, claimed_ = 0;
  std::size_t held_[2] = {0, 0};
  std::size_t room_ = 0;  ///< what the device last had free, less what was made since
  std::uint64_t last_serial_ = 0;
};

}  // namespace evmm
