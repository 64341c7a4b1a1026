// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/fault_driver.hpp"
#include "tests/support/gated_driver.hpp"
#include "tests/unit/allocator_oracle.hpp"

#include <evmm/allocator/caching_allocator.hpp>
#include <evmm/host_driver.hpp>
#include <evmm/units.hpp>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

namespace evmm::test {

/// Operations of a run: EVMM_MODEL_OPERATIONS, shared by all runs, else few enough for every day.
std::size_t model_operations(std::size_t runs);
/// EVMM_MODEL_SEED, or 0.
std::uint64_t model_seed();

/// The same numbers with every standard library.
class model_random {
 public:
  explicit model_random(std::uint64_t seed) : engine_(seed) {}
  std::size_t below(std::size_t end) { return static_cast<std::size_t>(engine_() % end); }
  bool one_in(std::size_t n) { return below(n) == 0; }
  /// As programs ask: mostly small, seldom huge.
  std::size_t size();

 private:
  std::mt19937_64 engine_;
};

/// Runs the allocator's internal checks where it has some and the build is one for that.
template <class Allocator>
void check_inside(const Allocator& allocator) {
#if EVMM_DEBUG_CHECKS
  if constexpr (requires { allocator.check_invariants(); }) allocator.check_invariants();
#else
  static_cast<void>(allocator);
#endif
}

struct model_case {
  const char* name;
  const char* config;
  bool by_event = true;  ///< cross_stream_reuse
  std::uint64_t seed = 1;
};

/// Random operations of one thread on a small device, against an oracle that knows all statistics
/// exactly. Each member that acts is one operation; GoogleTest hears what is wrong.
class allocator_model {
 public:
  explicit allocator_model(const model_case& what);
  ~allocator_model();

  /// Stops at the first failure, which it describes with seed and operation.
  void run(std::size_t operations);
  /// Frees everything and looks for what is left.
  void finish();

 private:
  static constexpr std::size_t k_capacity = std::size_t{192} << 20;
  static constexpr std::size_t k_streams = 5;  // the first is the default stream

  struct route {
    int pool;
    native_stream stream;  ///< null: of the calling thread
    bool whole_thread;
  };
  struct pool {
    pool_id id;
    pool_options options;
    bool released = false;
  };
  struct captured_graph {
    std::shared_ptr<const host_graph> work;
    native_stream stream = nullptr;
    int pool = 0;
    std::vector<void*> left = {};
  };

  void step();
  void look_inside();
  void compare_often();
  void compare_seldom();

  // Operations.
  void allocate();
  void free_one();
  void free_most();
  void use_on_another_stream();
  void allocate_where_freed();
  void empty_cache();
  void change_gates();
  void change_pools();
  void capture();
  void replay_or_drop_graph();
  void do_wrong();
  void reset_statistics();

  // What they are made of.
  native_stream any_stream() { return streams_[random_.below(k_streams)]; }
  int route_of(native_stream stream) const;
  bool arm();
  /// Nullopt when there is no memory, or a driver call was failed on purpose.
  std::optional<live_block> allocate_block(std::size_t bytes, native_stream stream, bool captured);
  std::optional<live_block> took(void* at, std::size_t bytes, native_stream stream, bool captured);
  void use(live_block& block, native_stream user);
  /// False when it was failed on purpose and the block is live still.
  bool free_block(const live_block& block);
  void check_shortage(std::size_t bytes, const std::string& said);
  void end_route(int pool);
  void release(int pool);
  void drop_graph(std::size_t which);
  void note(const char* what, std::size_t value = 0);

  const model_case what_;
  model_random random_;
  const std::shared_ptr<host_driver> host_;
  const std::shared_ptr<fault_driver> faults_;
  const std::shared_ptr<gated_driver> gates_;
  const std::size_t descriptors_;
  std::array<native_stream, k_streams> streams_{};
  native_event event_ = nullptr;
  std::optional<caching_allocator> allocator_;
  allocator_oracle oracle_;
  marker marks_;

  std::vector<void*> order_;  ///< live blocks that may be freed, in no order
  std::vector<pool> pools_ = {pool{}};
  std::vector<route> routes_;
  std::vector<captured_graph> graphs_;
  std::size_t live_bytes_ = 0;
  bool growing_ = true;
  std::uint64_t operation_ = 0;
  std::uint64_t tags_ = 0;
  std::size_t failed_calls_ = 0, shortages_ = 0;
  struct noted {
    std::uint64_t operation;
    const char* what;
    std::size_t value;
  };
  std::array<noted, 32> notes_{};
  std::size_t notes_made_ = 0;
};

}  // namespace evmm::test
