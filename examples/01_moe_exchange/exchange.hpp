// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "exchange_ops.hpp"
#include "options.hpp"
#include "record.hpp"
#include "routing.hpp"

#include <evmm/comm/symmetric_region.hpp>
#include <evmm/elastic_region.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace moe {

/// A stream that is drained before anything declared ahead of it goes away.
class owned_stream {
 public:
  owned_stream(std::shared_ptr<evmm::driver> on, evmm::device_id device);
  owned_stream(const owned_stream&) = delete;
  owned_stream& operator=(const owned_stream&) = delete;
  ~owned_stream();
  evmm::native_stream get() const { return stream_; }

 private:
  std::shared_ptr<evmm::driver> on_;
  evmm::native_stream stream_;
};

/// The exchange on one rank. All ranks make the same calls in the same order.
class exchange {
 public:
  /// Makes the workspace and the region: DEVICE segments for the expected load, a HOST_NUMA
  /// segment for a first part of the tail.
  exchange(std::shared_ptr<evmm::bootstrap> ranks, std::shared_ptr<evmm::driver> on,
           const options& wanted, const routing& trace);

  /// One step on the next tokens, every output compared with the reference. A region too small for
  /// what arrives grows first.
  void step(int index);

  /// The changes between steps: after step 0 the tail grows to the worst case, after step 1 the
  /// second DEVICE segment moves to HOST_NUMA, after step 2 it moves back. Each time the rows
  /// still in the buffer are combined again and must give the same outputs.
  void change_after(int index);

  /// Collective; gives everything back.
  void close();

  const run_record& record() const { return record_; }

 private:
  void make_workspace();
  void make_region();
  void describe_ranks();

  void load(const token_slice& slice);
  exchange_plan gather_counts();
  void make_room(const exchange_plan& plan);
  void send_plan(const exchange_plan& plan, const std::vector<std::int32_t>& ids);
  void run_phases(step_record& into);
  std::uint64_t check_outputs();

  void change(std::string what, bool required, const std::function<void()>& act);
  void note_moment(std::string label);
  double timed(int repeat, const std::function<void()>& enqueue);
  void barrier() { ops_->barrier(step_, ++round_); }
  std::size_t round_up(std::uint64_t bytes) const;

  /// Between the workspace and ordinary memory; both block until the copy is made.
  template <class T>
  void upload(const T* to, const std::vector<T>& from) {
    copy(to, from.data(), from.size() * sizeof(T));
  }
  template <class T>
  void download(std::vector<T>& to, const T* from) {
    copy(to.data(), from, to.size() * sizeof(T));
  }
  void copy(const void* to, const void* from, std::size_t bytes);

  std::shared_ptr<evmm::bootstrap> ranks_;
  std::shared_ptr<evmm::driver> on_;
  options wanted_;
  const routing& trace_;
  evmm::device_id device_;
  expert_placement placement_;
  work_split split_;
  run_record record_;

  exchange_step step_;
  evmm::elastic_region workspace_;
  evmm::symmetric_region region_;
  owned_stream stream_;
  std::unique_ptr<exchange_ops> ops_;

  std::uint64_t round_ = 0;
  bool migrated_ = false;
  std::vector<std::int32_t> ids_;    ///< of this rank's tokens in the step
  std::vector<bf16> expected_;       ///< their outputs, from the reference
  std::vector<std::uint64_t> used_;  ///< by rank
};

}  // namespace moe
