// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/driver.hpp>

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>

namespace evmm {

/// What one driver has reserved, created and mapped. CUDA answers most wrong calls with a bare
/// CUDA_ERROR_INVALID_VALUE, some with a crash and a few not at all; the ledger knows, and says it
/// with values.
///
/// Each change is entered before the driver is asked for it where the change takes something (so
/// that two threads cannot both have it), and taken back when the driver refuses.
/// Pure bookkeeping: no CUDA here. Thread-safe. Errors: invalid_argument.
class vmm_ledger {
 public:
  struct memory {
    allocation_request request;
    bool imported = false;
  };
  /// A mapping that was taken out, to be put back.
  struct taken_mapping {
    address at = 0;
    std::size_t bytes = 0;
    std::shared_ptr<const memory> backing;
  };

  // --- reserved ranges
  void add_range(address base, std::size_t bytes);
  /// Throws unless exactly this was reserved and nothing is mapped in it.
  void remove_range(address base, std::size_t bytes);

  // --- handles; the driver may give one value several times, each time with a reference
  void add_handle(allocation_handle handle, const allocation_request& request, bool imported);
  /// Throws for a handle that this driver did not give, or that was released.
  std::shared_ptr<const memory> find(allocation_handle handle) const;
  /// Drops one reference; returns what it stood for, so that add_back can undo it.
  std::shared_ptr<const memory> remove_handle(allocation_handle handle);
  void add_back(allocation_handle handle, std::shared_ptr<const memory> what);

  // --- mappings
  /// Throws unless [at, at + bytes) is inside one reserved range, free, and as large as the handle.
  void add_mapping(address at, std::size_t bytes, allocation_handle handle);
  /// Throws unless exactly this was mapped.
  taken_mapping remove_mapping(address at, std::size_t bytes);
  void add_back(taken_mapping mapping);
  /// Throws unless [at, at + bytes) is fully mapped and ends on mapping boundaries, and, when
  /// `by_cpu`, unless all of it is host memory.
  void check_access(address at, std::size_t bytes, bool by_cpu) const;
  /// Throws when [at, at + bytes) begins in a mapping and ends where nothing is mapped: CUDA looks
  /// at the first byte alone. Returns bytes_in_one_place(at, bytes).
  std::size_t check_work(address at, std::size_t bytes, std::string_view doing) const;
  /// Bytes from `at` on that mappings cover and that lie in one place, a device or a node; at most
  /// `most`, which is also the answer for an address in no mapping.
  std::size_t bytes_in_one_place(address at, std::size_t most) const;

  // --- totals
  /// Bytes created by this driver (not imported) that a handle or a mapping keeps alive.
  std::size_t held(memory_location where) const;
  struct totals {
    std::size_t ranges = 0, handles = 0, mappings = 0;
  };
  totals alive() const;

 private:
  struct handle_entry {
    std::shared_ptr<const memory> what;
    int references = 0;
  };
  struct mapping_entry {
    std::size_t bytes = 0;
    std::shared_ptr<const memory> what;
  };

  const handle_entry& entry_of(allocation_handle handle) const;
  /// bytes_in_one_place(), 0 for an address in no mapping. Under the lock.
  std::size_t stretch(address at, std::size_t most) const;

  mutable std::mutex mutex_;
  std::map<address, std::size_t> ranges_;
  std::map<address, mapping_entry> mappings_;
  std::unordered_map<allocation_handle, handle_entry> handles_;
};

}  // namespace evmm
