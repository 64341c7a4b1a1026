// SPDX-License-Identifier: Apache-2.0
#include "comm/ranks_text.hpp"
#include "comm/thread_link.hpp"
#include "comm/wire.hpp"

#include <evmm/comm/bootstrap.hpp>

#include <fmt/format.h>

#include <condition_variable>
#include <mutex>
#include <utility>

namespace evmm {

namespace {

/// Where the threads meet. The last to arrive publishes the step's result; a rank can be at most
/// one step ahead, since the next result needs everybody again.
class meeting {
 public:
  explicit meeting(int size) : posted_(static_cast<std::size_t>(size)), left_(posted_.size()) {}

  std::vector<byte_vector> gather(int rank, std::span<const std::byte> mine,
                                  std::chrono::steady_clock::time_point deadline,
                                  std::chrono::milliseconds timeout, std::string_view step) {
    std::unique_lock lock(mutex_);
    if (lost_) throw_lost();
    posted_[static_cast<std::size_t>(rank)].emplace(mine.begin(), mine.end());
    const auto generation = generation_;
    if (missing().empty()) publish();
    const auto ended = [&] { return generation_ != generation || lost_ || someone_left(); };
    const bool in_time = changed_.wait_until(lock, deadline, ended);
    if (generation_ != generation) return *published_;
    if (!lost_) {
      const auto late = missing();
      lost_ = in_time ? wire_error{error_category::peer_error,
                                   {fmt::format("{} left before {}", ranks_text(late), step)}}
                      : wire_error{error_category::timed_out, not_arrived(step, late, timeout)};
      changed_.notify_all();
    }
    throw_lost();
  }

  /// The post office of the nth link that a rank makes.
  std::shared_ptr<post_office> office(std::size_t nth) {
    const std::lock_guard lock(mutex_);
    while (offices_.size() <= nth)
      offices_.push_back(std::make_shared<post_office>(posted_.size()));
    return offices_[nth];
  }

  void leave(int rank) {
    const std::lock_guard lock(mutex_);
    left_[static_cast<std::size_t>(rank)] = true;
    changed_.notify_all();
  }

 private:
  std::vector<int> missing() const {
    std::vector<int> ranks;
    for (std::size_t i = 0; i < posted_.size(); ++i) {
      if (!posted_[i]) ranks.push_back(static_cast<int>(i));
    }
    return ranks;
  }
  /// Whether a rank that the step still waits for is gone.
  bool someone_left() const {
    for (std::size_t i = 0; i < posted_.size(); ++i) {
      if (!posted_[i] && left_[i]) return true;
    }
    return false;
  }
  void publish() {
    auto result = std::make_shared<std::vector<byte_vector>>();
    for (auto& bytes : posted_) {
      result->push_back(std::move(*bytes));
      bytes.reset();
    }
    published_ = std::move(result);
    ++generation_;
    changed_.notify_all();
  }
  [[noreturn]] void throw_lost() const { throw_error(lost_->category, lost_->info); }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::optional<byte_vector>> posted_;
  std::vector<bool> left_;
  std::vector<std::shared_ptr<post_office>> offices_;
  std::shared_ptr<const std::vector<byte_vector>> published_;
  std::uint64_t generation_ = 0;
  std::optional<wire_error> lost_;  ///< set once; everybody who comes later throws it too
};

class thread_bootstrap final : public bootstrap {
 public:
  thread_bootstrap(int rank, std::span<const std::string> hosts, std::shared_ptr<meeting> where)
      : bootstrap(rank_id{rank}, static_cast<int>(hosts.size())), where_(std::move(where)) {
    set_nodes(hosts);
  }
  ~thread_bootstrap() override { where_->leave(rank().value); }

  std::shared_ptr<node_link> make_link() override {
    return std::make_shared<thread_link>(rank(), where_->office(links_made_++));
  }

 private:
  std::vector<byte_vector> gather(std::span<const std::byte> mine,
                                  std::chrono::steady_clock::time_point deadline,
                                  std::string_view step) override {
    return where_->gather(rank().value, mine, deadline, timeout(), step);
  }

  std::shared_ptr<meeting> where_;
  std::size_t links_made_ = 0;
};

}  // namespace

std::vector<std::shared_ptr<bootstrap>> make_thread_bootstraps(int size,
                                                               std::vector<std::string> hosts) {
  if (size < 1) throw invalid_argument(fmt::format("{} ranks", size));
  if (hosts.empty()) hosts.resize(static_cast<std::size_t>(size));
  if (hosts.size() != static_cast<std::size_t>(size)) {
    throw invalid_argument(fmt::format("{} hosts named for {} ranks", hosts.size(), size),
                           "name the host of each rank, or none");
  }
  const auto where = std::make_shared<meeting>(size);
  std::vector<std::shared_ptr<bootstrap>> made;
  for (int r = 0; r < size; ++r) {
    made.push_back(std::make_shared<thread_bootstrap>(r, hosts, where));
  }
  return made;
}

}  // namespace evmm
