// SPDX-License-Identifier: Apache-2.0
#include "comm/ranks_text.hpp"
#include "comm/wire.hpp"
#include "lib/support/log.hpp"

#include <evmm/comm/bootstrap.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace evmm {

namespace {

using clock = std::chrono::steady_clock;

/// How long one look at the store waits before asking whether another rank gave up.
constexpr std::chrono::milliseconds k_look{100};

class store_bootstrap final : public bootstrap {
 public:
  store_bootstrap(rank_id rank, int size, key_value_store store, std::string job)
      : bootstrap(rank, size), store_(std::move(store)), job_(std::move(job)) {
    if (!store_.set || !store_.get) {
      throw invalid_argument("a key-value store without set or get");
    }
    find_nodes();
  }

 private:
  std::vector<byte_vector> gather(std::span<const std::byte> mine, clock::time_point deadline,
                                  std::string_view step) override {
    try {
      return gather_from_store(mine, deadline, step);
    } catch (...) {
      if (told_) throw;
      auto why = describe_error(std::current_exception()).info;
      why.message = fmt::format("{} failed on rank {}: {}", step, rank().value, why.message);
      tell({error_category::peer_error, why});
      throw peer_error(std::move(why));
    }
  }

  std::vector<byte_vector> gather_from_store(std::span<const std::byte> mine,
                                             clock::time_point deadline, std::string_view step) {
    // A rank in this step has been through the last one, so all ranks have left the one before it.
    if (step_ >= 2 && store_.erase) store_.erase(key(step_ - 2, rank().value));
    store_.set(key(step_, rank().value), mine);
    throw_if_lost();  // the others may have waited for this rank long enough
    std::vector<byte_vector> gathered(static_cast<std::size_t>(size()));
    for (int r = 0; r < size(); ++r) {
      auto& into = gathered[static_cast<std::size_t>(r)];
      if (r == rank().value) {
        into.assign(mine.begin(), mine.end());
        continue;
      }
      auto value = wait_for(key(step_, r), deadline);
      if (!value) give_up(r, step);
      into = std::move(*value);
    }
    ++step_;
    return gathered;
  }

  std::optional<byte_vector> wait_for(const std::string& wanted, clock::time_point deadline) {
    for (;;) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - clock::now());
      if (auto value = store_.get(wanted, std::clamp(left, milliseconds{0}, k_look))) return value;
      throw_if_lost();
      if (clock::now() >= deadline) return std::nullopt;
    }
  }

  /// Throws what the rank that gave up first has thrown.
  void throw_if_lost() {
    const auto lost = store_.get(lost_key(), milliseconds{0});
    if (!lost) return;
    told_ = true;
    wire_reader in(*lost, "a rank that gave up");
    auto why = get_error(in);
    throw_error(why.category, std::move(why.info));
  }

  /// Rank `first` has not come. Names all who have not, and tells the others in the store.
  [[noreturn]] void give_up(int first, std::string_view step) {
    std::vector<int> missing = {first};
    for (int r = first + 1; r < size(); ++r) {
      if (r != rank().value && !store_.get(key(step_, r), milliseconds{0})) missing.push_back(r);
    }
    auto why = not_arrived(step, missing, timeout());
    tell({error_category::timed_out, why});
    throw timed_out(std::move(why));
  }

  /// Other ranks throw the same, in this step or when they come to it.
  void tell(const wire_error& why) noexcept {
    told_ = true;
    log_failure("telling other ranks of a lost step", [&] {
      wire_writer out;
      put_error(out, why.category, why.info);
      store_.set(lost_key(), out.take());
    });
  }

  std::string key(std::uint64_t step, int rank) const {
    return fmt::format("evmm/{}/{}/{}", job_, step, rank);
  }
  std::string lost_key() const { return fmt::format("evmm/{}/lost", job_); }

  key_value_store store_;
  std::string job_;
  std::uint64_t step_ = 0;
  bool told_ = false;  ///< why a step was lost, by this rank or to it
};

class callback_bootstrap final : public bootstrap {
 public:
  callback_bootstrap(rank_id rank, int size, all_gather_function gather)
      : bootstrap(rank, size), gather_(std::move(gather)) {
    if (!gather_) throw invalid_argument("an empty all_gather callback");
    find_nodes();
  }

 private:
  std::vector<byte_vector> gather(std::span<const std::byte> mine, clock::time_point,
                                  std::string_view) override {
    return gather_(mine);
  }

  all_gather_function gather_;
};

}  // namespace

std::shared_ptr<bootstrap> make_store_bootstrap(rank_id rank, int size, key_value_store store,
                                                std::string job) {
  return std::make_shared<store_bootstrap>(rank, size, std::move(store), std::move(job));
}

std::shared_ptr<bootstrap> make_callback_bootstrap(rank_id rank, int size,
                                                   all_gather_function gather) {
  return std::make_shared<callback_bootstrap>(rank, size, std::move(gather));
}

}  // namespace evmm
