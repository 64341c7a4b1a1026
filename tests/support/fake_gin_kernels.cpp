// SPDX-License-Identifier: Apache-2.0
#include "tests/support/fake_gin_kernels.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

namespace evmm::test {

namespace {

std::shared_ptr<fake_gin>& current() {
  static std::shared_ptr<fake_gin> now;
  return now;
}

int rank_of(const nccl_api& api, ncclComm* comm) {
  int rank = 0;
  api.comm_rank(comm, &rank);
  return rank;
}

class kernels final : public gin_kernels {
 public:
  int create(const nccl_api& api, ncclComm* comm, int ranks) override {
    api_ = &api;
    me_ = rank_of(api, comm);
    return api.device_comm_create(comm, &ranks, this);
  }
  int destroy(const nccl_api& api, ncclComm* comm) override {
    return api.device_comm_destroy(comm, this);
  }

  void launch(std::span<const put_step> steps, const target& at, native_stream stream) override {
    for (const put_step& each : steps) {
      void* from = nullptr;
      void* to = nullptr;
      if (each.kind == put_step::what::put) {
        api_->peer_pointer(at.window, each.from, me_, &from);
        api_->peer_pointer(at.window, each.to, each.peer, &to);
      }
      job_->drivers[static_cast<std::size_t>(me_)]->launch(
          stream, [this, each, at, from, to] { carry_out(each, at, from, to); });
    }
  }

 private:
  std::atomic<std::uint64_t>& signal(int rank, std::uint32_t which) {
    return job_->signals[static_cast<std::size_t>(rank) * job_->of_each + which];
  }
  bool came(std::uint32_t which, const put_step& each, const target& at) {
    const auto until = std::chrono::steady_clock::now() + at.patience;
    while (signal(me_, which) < each.value) {
      if (__atomic_load_n(at.late, __ATOMIC_ACQUIRE) != 0) return false;
      if (std::chrono::steady_clock::now() > until) {
        __atomic_store_n(at.late, 1 + static_cast<std::uint64_t>(each.peer), __ATOMIC_RELEASE);
        return false;
      }
      std::this_thread::yield();
    }
    return true;
  }
  void carry_out(const put_step& each, const target& at, const void* from, void* to) {
    using what = put_step::what;
    if (each.kind == what::announce) ++signal(each.peer, ready_signal(me_));
    if (each.kind == what::await) came(data_signal(each.peer), each, at);
    if (each.kind != what::put || !came(ready_signal(each.peer), each, at)) return;
    std::memcpy(to, from, each.bytes);
    ++job_->puts;
    ++signal(each.peer, data_signal(me_));
  }

  std::shared_ptr<fake_gin> job_ = current();
  const nccl_api* api_ = nullptr;
  int me_ = 0;
};

}  // namespace

void use_fake_gin(std::shared_ptr<fake_gin> next) {
  current() = std::move(next);
}

}  // namespace evmm::test

// In place of those of evmm::comm, which are then not linked.
namespace evmm {

int gin_kernels_version() noexcept {
  const auto& job = test::current();
  return job != nullptr ? job->version : 0;
}
int look_for_gin(const nccl_api& api, ncclComm* comm, gin_fabric& found) {
  found = test::current()->fabrics[static_cast<std::size_t>(test::rank_of(api, comm))];
  return api.query_properties(comm, &found);
}
std::unique_ptr<gin_kernels> make_gin_kernels() {
  return std::make_unique<test::kernels>();
}

}  // namespace evmm
