// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl_gin.hpp"

#include "comm/collective_change.hpp"
#include "lib/support/log.hpp"
#include "lib/support/nccl_version.hpp"

#include <evmm/comm/nccl_window.hpp>

#include <fmt/format.h>

#include <optional>
#include <utility>

namespace evmm {

namespace {

/// Page-locked, so that kernels and this process both see it.
class late_word {
 public:
  explicit late_word(std::shared_ptr<driver> on)
      : on_(std::move(on)), at_(on_->allocate_pinned(sizeof(std::uint64_t))) {
    *get() = 0;
  }
  late_word(const late_word&) = delete;
  late_word& operator=(const late_word&) = delete;
  ~late_word() {
    log_failure("freeing a word", [&] { on_->free_pinned(at_); });
  }
  std::uint64_t* get() const { return reinterpret_cast<std::uint64_t*>(at_); }
  std::uint64_t value() const { return __atomic_load_n(get(), __ATOMIC_ACQUIRE); }

 private:
  std::shared_ptr<driver> on_;
  address at_;
};

/// The kernels on a communicator.
class gin_contexts {
 public:
  /// Collective; a failure breaks the communicator.
  explicit gin_contexts(std::shared_ptr<nccl_communicator::state> over) : over_(std::move(over)) {
    const device_scope current(*over_->on, over_->device);
    kernels_ = make_gin_kernels();
    over_->kept.emplace_back(kernels_);
    over_->collective_call("ncclDevCommCreate", [&] {
      return kernels_->create(over_->api, over_->comm, over_->ranks->size());
    });
    ++over_->registered;
  }
  gin_contexts(const gin_contexts&) = delete;
  gin_contexts& operator=(const gin_contexts&) = delete;
  ~gin_contexts() {
    --over_->registered;
    if (!over_->can_deregister("ncclDevCommDestroy")) return;
    log_failure("destroying a device communicator", [&] {
      const device_scope current(*over_->on, over_->device);
      over_->call("ncclDevCommDestroy", kernels_->destroy(over_->api, over_->comm));
    });
  }
  void launch(std::span<const put_step> steps, const gin_kernels::target& at,
              native_stream stream) {
    over_->check_usable();
    const device_scope current(*over_->on, over_->device);
    kernels_->launch(steps, at, stream);
  }

 private:
  std::shared_ptr<nccl_communicator::state> over_;
  std::shared_ptr<gin_kernels> kernels_;
};

class gin_port final : public put_port {
 public:
  gin_port(const nccl_communicator::state& like, symmetric_region& region)
      : nccl_(like.ranks, like.on, {.device = like.device}),
        window_(nccl_, region, {.kernels_only = true}) {
    agree_on(*like.ranks, "gin: contexts", [&] {
      late_.emplace(like.on);
      contexts_.emplace(nccl_.shared());
    });
  }

  std::string name() const override { return "NCCL GIN"; }
  std::string why_down() const override { return window_.why_down(); }
  void carry_out(std::span<const put_step> steps, std::chrono::milliseconds patience,
                 native_stream stream) override {
    // One, from the region's base: NCCL that has GIN registers several segments together.
    ncclWindow_vidmem* const window = window_.pieces().empty() ? nullptr : window_.at(0).window;
    contexts_->launch(steps, {window, late_->get(), patience}, stream);
  }
  std::optional<rank_id> late() const override {
    const std::uint64_t rank = late_->value();
    if (rank == 0) return std::nullopt;
    return rank_id{static_cast<int>(rank - 1)};
  }

 private:
  nccl_communicator nccl_;
  nccl_window window_;
  std::optional<late_word> late_;
  std::optional<gin_contexts> contexts_;
};

}  // namespace

std::string why_not_gin_kernels(int compiled, int loaded) {
  if (compiled == 0) return "evmm was built without nccl_device.h, and so without kernels for it";
  if (compiled == loaded) return {};
  return fmt::format(
      "evmm's kernels were compiled with NCCL {}, and run with no other; NCCL {} is loaded (build "
      "with its headers: NCCL_ROOT)",
      nccl_version_text(compiled), nccl_version_text(loaded));
}

std::string why_not_gin_fabric(const gin_fabric& fabric) {
  if (!fabric.windows) {
    return "NCCL cannot have the memory of all ranks in windows (it takes NVLink or GIN between "
           "all, and no NCCL_CUMEM_ENABLE=0; NCCL_DEBUG=INFO says more)";
  }
  if (fabric.to_all) return {};
  if (fabric.on_rails) {
    return "NCCL finds GIN only between ranks with the same index on their nodes (NCCL_CROSS_NIC, "
           "rails that do not meet)";
  }
  return "NCCL finds no network with GIN on every rank: it takes InfiniBand or RoCE with GPUDirect "
         "RDMA (NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET says what it found)";
}

std::string why_not_gin(const nccl_communicator::state& over) {
  std::string why = over.why_not(nccl_ability::gin);
  if (!why.empty()) return why;
  gin_fabric found;
  over.call("ncclCommQueryProperties", look_for_gin(over.api, over.comm, found));
  return why_not_gin_fabric(found);
}

std::unique_ptr<put_port> make_gin_port(const nccl_communicator::state& like,
                                        symmetric_region& region) {
  return std::make_unique<gin_port>(like, region);
}

}  // namespace evmm
