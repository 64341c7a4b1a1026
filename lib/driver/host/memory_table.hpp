// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/driver.hpp>
#include <evmm/host_driver.hpp>
#include <evmm/unique_fd.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>

namespace evmm::host {

/// What is reserved, created and mapped, and who may touch it. Refuses what the real driver
/// refuses, before anything is done. Thread-safe.
class memory_table {
 public:
  explicit memory_table(const host_driver_options& options);
  memory_table(const memory_table&) = delete;
  memory_table& operator=(const memory_table&) = delete;
  ~memory_table();

  /// Throws invalid_argument for a device or node that does not exist.
  void check_location(memory_location where) const;
  memory_usage usage(memory_location where) const;

  /// Counts bytes of memory made elsewhere as held there. Throws out_of_memory: "<doing> 2.0 MiB on
  /// DEVICE 0: ...".
  void take(memory_location where, std::size_t bytes, std::string_view doing);
  void give_back(memory_location where, std::size_t bytes) noexcept;
  /// Whether some of the range is reserved here.
  bool reserved(address at, std::size_t bytes) const;

  address reserve(std::size_t bytes, std::size_t alignment, address hint);
  void free(address base, std::size_t bytes);
  allocation_handle create(const allocation_request& request);
  void release(allocation_handle handle);
  void map(address at, std::size_t bytes, allocation_handle handle);
  void unmap(address at, std::size_t bytes);
  void set_access(address at, std::size_t bytes, std::span<const access_grant> grants);

  unique_fd export_fd(allocation_handle handle) const;
  allocation_handle import_fd(int fd, const allocation_request& request);
  fabric_handle export_fabric(allocation_handle handle) const;
  allocation_handle import_fabric(const fabric_handle& shared, const allocation_request& request);

  /// Why [at, at + bytes) may not be touched in this way; nullopt when it may, and when nothing of
  /// it is reserved here, so that it is ordinary memory.
  std::optional<std::string> why_untouchable(address at, std::size_t bytes, access_kind need) const;

 private:
  /// Bytes of a device or node that are held; given back when the last user of `charge` goes.
  struct account {
    std::size_t total = 0;
    std::size_t held = 0;
  };
  /// Shared by a handle and its mappings. Imports have none: their owner pays.
  struct charge {
    charge(account& from, std::size_t taken) : payer(from), bytes(taken) { payer.held += bytes; }
    charge(const charge&) = delete;
    charge& operator=(const charge&) = delete;
    ~charge() { payer.held -= bytes; }
    account& payer;
    const std::size_t bytes;
  };
  struct physical {
    unique_fd pages;
    std::size_t bytes = 0;
    tier kind = tier::device;
    share_kind share = share_kind::none;
    std::shared_ptr<charge> paid = nullptr;
  };
  struct mapped {
    std::size_t bytes = 0;
    tier kind = tier::device;
    std::shared_ptr<charge> paid;
    std::map<memory_location, access_kind> grants;
    access_kind access = access_kind::none;  ///< the most that any grant allows
  };
  using mapped_table = std::map<address, mapped>;

  static void check_room(const account& payer, memory_location where, std::size_t bytes,
                         std::string_view doing);
  account& account_of(memory_location where);
  physical& find(allocation_handle handle);
  const physical& find(allocation_handle handle) const;
  allocation_handle add(physical made);
  const physical& exportable(allocation_handle handle, share_kind share) const;
  /// The first mapping that reaches past `at`.
  mapped_table::iterator first_past(address at);
  void check_in_one_range(address at, std::size_t bytes, std::string_view doing) const;

  mutable std::mutex mutex_;
  const bool fabric_;
  std::map<memory_location, account> accounts_;
  std::map<address, std::size_t> ranges_;
  mapped_table mapped_;
  std::unordered_map<std::uint64_t, physical> handles_;
  std::uint64_t next_handle_ = 1;  ///< never used twice, so that a stale handle is found out
};

}  // namespace evmm::host
