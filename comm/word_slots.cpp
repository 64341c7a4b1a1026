// SPDX-License-Identifier: Apache-2.0
#include "comm/word_slots.hpp"

#include "lib/support/log.hpp"

#include <memory>
#include <new>

namespace evmm {

namespace {
constexpr std::size_t k_page = 4096;
}

word_slots::~word_slots() {
  if (free_.size() != made_) {
    log().warn("{} page-locked words are left behind: streams may still wait there",
               made_ - free_.size());
    return;
  }
  for (const address page : pages_) {
    log_failure("freeing a channel's words", [&] { on_.free_pinned(page); });
  }
}

word_slot& word_slots::take() {
  const std::lock_guard lock(mutex_);
  if (free_.empty()) {
    constexpr std::size_t in_a_page = k_page / sizeof(word_slot);
    pages_.reserve(pages_.size() + 1);
    free_.reserve(made_ + in_a_page);  // so that giving back cannot fail
    pages_.push_back(on_.allocate_pinned(k_page));
    auto* const slots = reinterpret_cast<word_slot*>(pages_.back());
    std::uninitialized_value_construct_n(slots, in_a_page);
    for (std::size_t i = in_a_page; i-- > 0;) free_.push_back(slots + i);
    made_ += in_a_page;
  }
  word_slot& taken = *free_.back();
  free_.pop_back();
  return taken;
}

void word_slots::give(word_slot& slot) noexcept {
  const std::lock_guard lock(mutex_);
  free_.push_back(&slot);
}

}  // namespace evmm
