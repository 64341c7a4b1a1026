// SPDX-License-Identifier: Apache-2.0
#include "lib/cli/proof.hpp"

#include "lib/cli/machine.hpp"

#include <evmm/address_range.hpp>
#include <evmm/error.hpp>
#include <evmm/mapping.hpp>
#include <evmm/physical_memory.hpp>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <utility>

namespace evmm::cli {

namespace {

/// Steps of one location, in order; after a failure the rest is only listed.
class trial {
 public:
  trial(driver& on, memory_location where, device_id accessor)
      : on_(on), where_(where), accessor_(accessor) {
    access_ = {{memory_location::on(accessor)}};
    if (where.kind == tier::host) access_.push_back({where});
  }

  std::vector<proof> run() {
    step("create", [&] { memory_.emplace(on_, request(share_kind::fd)); });
    step("map", [&] {
      range_.emplace(on_, 2 * granule(), 0);
      on_.map(range_->base(), granule(), memory_->handle());
      on_.unmap(range_->base(), granule());
    });
    step("access", [&] { first_.emplace(on_, range_->base(), *memory_, access_); });
    step("touch", [&] {
      fill(first_->base(), std::byte{0x5a});
      expect(first_->base(), std::byte{0x5a}, "the bytes that were filled");
    });
    if (where_.kind == tier::host) {
      step("cpu", [&] {
        auto* const bytes = reinterpret_cast<std::byte*>(first_->base());
        if (*bytes != std::byte{0x5a}) throw driver_error("the CPU reads other bytes");
        std::memset(bytes, 0xa5, k_sample);
        expect(first_->base(), std::byte{0xa5}, "what the CPU wrote");
      });
    }
    step("export_fd", [&] { shared_ = memory_->export_fd(); });
    step("import_fd", [&] {
      see_the_same(physical_memory::import_fd(on_, shared_.get(), request(share_kind::fd)));
    });
    // Apart from the steps before: memory that goes by descriptor does not go over the fabric.
    failed_ = false;
    step("fabric", [&] {
      const physical_memory made(on_, request(share_kind::fabric));
      const auto imported =
          physical_memory::import_fabric(on_, made.export_fabric(), request(share_kind::fabric));
    });
    return std::move(proofs_);
  }

 private:
  static constexpr std::size_t k_sample = 4096;

  template <class Step>
  void step(std::string what, Step&& attempt) {
    proof result{.what = std::move(what), .where = to_string(where_)};
    if (!failed_) {
      result.tried = true;
      result.detail = failure_of(attempt);
      result.worked = result.detail.empty();
      failed_ = !result.worked;
    }
    proofs_.push_back(std::move(result));
  }

  std::size_t granule() const {
    return std::max(on_.granularity(where_), on_.granularity(memory_location::on(accessor_)));
  }
  allocation_request request(share_kind share) const {
    return {.bytes = granule(), .where = where_, .share = share};
  }

  void fill(address at, std::byte value) {
    with_stream([&](native_stream stream) { on_.fill(at, value, k_sample, stream); });
  }
  void expect(address at, std::byte value, const char* what) {
    std::array<std::byte, k_sample> seen{};
    with_stream([&](native_stream stream) {
      on_.copy(reinterpret_cast<address>(seen.data()), at, k_sample, stream);
    });
    for (const std::byte each : seen) {
      if (each != value) throw driver_error(std::string("a copy does not show ") + what);
    }
  }
  template <class Work>
  void with_stream(Work&& work) {
    const native_stream stream = on_.create_stream(accessor_);
    const std::string failure = failure_of([&] {
      work(stream);
      on_.synchronize(stream);
    });
    on_.destroy_stream(stream);
    if (!failure.empty()) throw driver_error(failure);
  }

  void see_the_same(const physical_memory& imported) {
    const mapping second(on_, range_->base() + granule(), imported, access_);
    fill(first_->base(), std::byte{0x3c});
    expect(second.base(), std::byte{0x3c}, "the same bytes at the second address");
  }

  driver& on_;
  memory_location where_;
  device_id accessor_;
  std::vector<access_grant> access_;
  std::vector<proof> proofs_;
  bool failed_ = false;
  // In this order: what is mapped goes before its range and its memory.
  std::optional<physical_memory> memory_;
  std::optional<address_range> range_;
  std::optional<mapping> first_;
  unique_fd shared_;
};

}  // namespace

std::vector<proof> prove(driver& on, memory_location where, device_id accessor) {
  return trial(on, where, accessor).run();
}

std::vector<proof> prove_all(driver& on) {
  std::vector<proof> all;
  const auto add = [&](memory_location where, device_id accessor) {
    for (proof& each : prove(on, where, accessor)) all.push_back(std::move(each));
  };
  std::optional<device_id> maps_host;
  for (int i = 0; i < on.device_count(); ++i) {
    add(memory_location::on(device_id{i}), device_id{i});
    if (!maps_host && on.describe(device_id{i}).host_memory) maps_host = device_id{i};
  }
  for (const numa_node node : on.numa_nodes()) {
    add(memory_location::on(node), maps_host.value_or(device_id{0}));
  }
  return all;
}

}  // namespace evmm::cli
