// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/allocator/event_pool.hpp"

#include <evmm/driver.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

namespace evmm {

/// Which work may still use freed bytes of a heap. Who gets the bytes next waits for it on its
/// stream; nobody asks whether it is over, save to forget what is.
class heap_uses {
 public:
  heap_uses(std::shared_ptr<driver> on, device_id device)
      : on_(std::move(on)), events_(on_, device) {}

  /// [at, at + bytes) was used by what is enqueued on these streams until now.
  void add(std::size_t at, std::size_t bytes, std::span<const native_stream> streams);
  /// `to` waits for all other streams that used any of these bytes.
  void hand_over(std::size_t at, std::size_t bytes, native_stream to);
  /// Forgets the uses of these bytes.
  void forget(std::size_t at, std::size_t bytes);
  /// Events behind all uses of [from, to); valid until they are forgotten.
  std::vector<native_event> events(std::size_t from, std::size_t to) const;

 private:
  struct mark {
    native_stream stream;
    std::uint64_t order;  ///< later marks of one stream come after earlier ones
    std::shared_ptr<const event_pool::lease> event;
  };
  struct piece {
    std::size_t bytes;
    std::vector<mark> marks;
  };
  using pieces = std::map<std::size_t, piece>;

  pieces::const_iterator first_touching(std::size_t from) const;
  /// The last mark of each stream on [from, to).
  std::vector<mark> last_marks(std::size_t from, std::size_t to) const;
  void forget_what_is_over();

  std::shared_ptr<driver> on_;
  event_pool events_;
  pieces pieces_;  ///< do not overlap
  std::uint64_t order_ = 0;
  std::size_t swept_at_ = 1024;  ///< pieces at which it is asked which are over
};

}  // namespace evmm
