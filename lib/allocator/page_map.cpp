// SPDX-License-Identifier: Apache-2.0
#include "lib/allocator/page_map.hpp"

#include <iterator>
#include <mutex>

namespace evmm {

page_map::page_map()
    : roots_(std::make_unique<std::atomic<leaf*>[]>(std::size_t{1} << root_bits)) {}

page_map::~page_map() {
  for (std::size_t i = 0; i < std::size_t{1} << root_bits; ++i) delete roots_[i].load();
}

bool page_map::even(address at, std::size_t bytes) noexcept {
  constexpr std::size_t page = std::size_t{1} << page_bits;
  return at % page == 0 && bytes % page == 0 &&
         (at + bytes) >> (leaf_bits + page_bits + root_bits) == 0;
}

void page_map::add(address at, std::size_t bytes, segment_record* segment) {
  if (!even(at, bytes)) {
    const std::unique_lock lock(guard_);
    extents_.insert_or_assign(at, extent{bytes, segment});
    ++uneven_;
    return;
  }
  for (address page = at; page < at + bytes;) {  // leaves first: they may not be had
    auto& root = roots_[page >> (leaf_bits + page_bits)];
    if (root.load(std::memory_order_relaxed) == nullptr) {
      root.store(new leaf{}, std::memory_order_release);
    }
    page = ((page >> (leaf_bits + page_bits)) + 1) << (leaf_bits + page_bits);
  }
  for (address page = at; page < at + bytes; page += address{1} << page_bits) {
    leaf* const pages = roots_[page >> (leaf_bits + page_bits)].load(std::memory_order_relaxed);
    pages->of[(page >> page_bits) & ((std::size_t{1} << leaf_bits) - 1)].store(
        segment, std::memory_order_release);
  }
}

void page_map::remove(address at, std::size_t bytes) noexcept {
  if (!even(at, bytes)) {
    const std::unique_lock lock(guard_);
    uneven_ -= extents_.erase(at);
    return;
  }
  for (address page = at; page < at + bytes; page += address{1} << page_bits) {
    leaf* const pages = roots_[page >> (leaf_bits + page_bits)].load(std::memory_order_relaxed);
    if (pages == nullptr) continue;
    pages->of[(page >> page_bits) & ((std::size_t{1} << leaf_bits) - 1)].store(
        nullptr, std::memory_order_release);
  }
}

void page_map::forget() noexcept {
  for (std::size_t i = 0; i < std::size_t{1} << root_bits; ++i) roots_[i].store(nullptr);
  uneven_ = 0;
}

bool page_map::any_in(address at, std::size_t bytes) const noexcept {
  constexpr std::size_t page = std::size_t{1} << page_bits;
  for (address each = at; each - at < bytes; each = (each / page + 1) * page) {
    if (find(each) != nullptr) return true;
  }
  const std::shared_lock lock(guard_);
  const auto next = extents_.lower_bound(at);
  return next != extents_.end() && next->first - at < bytes;
}

segment_record* page_map::find_uneven(address at) const noexcept {
  const std::shared_lock lock(guard_);
  auto next = extents_.upper_bound(at);
  if (next == extents_.begin()) return nullptr;
  const auto& [base, found] = *std::prev(next);
  return at - base < found.bytes ? found.segment : nullptr;
}

}  // namespace evmm
