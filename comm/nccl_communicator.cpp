// SPDX-License-Identifier: Apache-2.0
#include "comm/collective_change.hpp"
#include "comm/nccl_state.hpp"
#include "lib/memory/segment_plan.hpp"
#include "lib/support/environment.hpp"
#include "lib/support/format.hpp"
#include "lib/support/log.hpp"
#include "lib/support/nccl_version.hpp"

#include <evmm/comm/nccl_communicator.hpp>
#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

namespace evmm {

namespace {

constexpr const char* k_stride = "NCCL_WIN_STRIDE";
/// The unit in which NCCL keeps addresses for windows.
constexpr std::size_t k_stride_unit = std::size_t{4} << 30;

const nccl_library& usable_library() {
  const nccl_library& found = load_nccl();
  if (!found.why_not.empty()) throw unsupported(found.why_not, found.help);
  return found;
}

error_category category_of(int result) {
  return result == nccl_remote_error ? error_category::peer_error : error_category::driver_error;
}

/// Whether this process has made a communicator here: NCCL has read its environment then.
std::atomic<bool>& environment_was_read() {
  static std::atomic<bool> read{false};
  return read;
}

/// NCCL_WIN_STRIDE as NCCL reads it: nullopt unless it is a number above 0.
std::optional<std::size_t> stride_from_environment() {
  const auto text = environment(k_stride);
  if (!text) return std::nullopt;
  const long long value = std::strtoll(text->c_str(), nullptr, 0);
  if (value <= 0) return std::nullopt;
  return static_cast<std::size_t>(value);
}

}  // namespace

/// NCCL_WIN_STRIDE where this process sets it itself: for a communicator, and no longer than until
/// it is known that there will be none.
class nccl_communicator::state::stride_setting {
 public:
  stride_setting() = default;
  stride_setting(const stride_setting&) = delete;
  stride_setting& operator=(const stride_setting&) = delete;
  ~stride_setting() {
    // NOLINTNEXTLINE(concurrency-mt-unsafe): NCCL offers no other way
    if (ours_) ::unsetenv(k_stride);
  }
  void set(std::size_t bytes) {
    // NOLINTNEXTLINE(concurrency-mt-unsafe): NCCL offers no other way
    ::setenv(k_stride, std::to_string(bytes).c_str(), 1);
    ours_ = true;
  }
  /// NCCL reads it next.
  void keep() noexcept { ours_ = false; }

 private:
  bool ours_ = false;
};

nccl_communicator::state::state(std::shared_ptr<bootstrap> ranks_given,
                                std::shared_ptr<driver> driver_given)
    : ranks(std::move(ranks_given)), on(std::move(driver_given)), api(load_nccl().api) {
  if (ranks == nullptr) throw invalid_argument("an NCCL communicator without a bootstrap");
  agree_on(*ranks, "nccl_communicator: library", [&] {
    if (on == nullptr) throw invalid_argument("an NCCL communicator without a driver");
    library = usable_library().path;
    call("ncclGetVersion", api.get_version(&version));
  });
  const auto versions = ranks->all_gather_value(version, "nccl_communicator: versions");
  for (std::size_t r = 1; r < versions.size(); ++r) {
    if (versions[r] == versions[0]) continue;
    throw unsupported(
        fmt::format("rank 0 has NCCL {}, rank {} has NCCL {}", nccl_version_text(versions[0]), r,
                    nccl_version_text(versions[r])),
        "use the same NCCL on all ranks; EVMM_NCCL_LIBRARY names its file");
  }
}

nccl_communicator::state::~state() {
  abort();
}

void nccl_communicator::state::abort() noexcept {
  if (!ours || comm == nullptr) return;
  log_failure("aborting an NCCL communicator",
              [&] { call("ncclCommAbort", api.comm_abort(std::exchange(comm, nullptr))); });
}

void nccl_communicator::state::call(std::string_view doing, int result) const {
  if (result == nccl_success || result == nccl_in_progress) return;
  const char* const name = api.error_string(result);
  const char* const last = comm != nullptr ? api.last_error(comm) : nullptr;
  throw_error(category_of(result),
              {.message = fmt::format(
                   "{}: {} (NCCL error {}){}{}", doing, name != nullptr ? name : "unknown", result,
                   last != nullptr && *last != '\0' ? ": " : "", last != nullptr ? last : ""),
               .help = "NCCL_DEBUG=WARN makes NCCL say more",
               .native_code = result});
}

void nccl_communicator::state::wait_until(std::string_view doing,
                                          const std::function<bool()>& done) const {
  const auto limit = ranks->timeout() / 2;
  const auto deadline = std::chrono::steady_clock::now() + limit;
  auto pause = std::chrono::microseconds(1);
  while (!done()) {
    if (std::chrono::steady_clock::now() > deadline) {
      throw timed_out(fmt::format("{}: NCCL was not done after {} ms", doing, limit.count()),
                      "look for a rank that did not come, or raise the bootstrap's timeout, of "
                      "which this is half (EVMM_TIMEOUT_MS)");
    }
    std::this_thread::sleep_for(pause);
    pause = std::min<std::chrono::microseconds>(2 * pause, std::chrono::milliseconds(1));
  }
}

void nccl_communicator::state::settle(std::string_view doing) const {
  wait_until(doing, [&] {
    int now = nccl_success;
    call(doing, api.async_error(comm, &now));
    call(doing, now);
    return now != nccl_in_progress;
  });
}

void nccl_communicator::state::break_off(const char* why) {
  if (!broken_by.empty()) return;
  broken_by = why;
  log().error("the NCCL communicator is broken on rank {}: {}", ranks->rank().value, why);
  // A call that was given up still runs, and would run beside whatever cleans up.
  abort();
}

void nccl_communicator::state::check_usable() const {
  if (closed) {
    throw invalid_argument("the NCCL communicator was closed", "make a new one");
  }
  if (!broken_by.empty()) {
    throw peer_error("the NCCL communicator is broken by an earlier step: " + broken_by,
                     "make a new communicator, and the windows again on that");
  }
}

void nccl_communicator::state::check_bare() const {
  if (registered == 0) return;
  throw invalid_argument(fmt::format("{} window{} or buffers are still on the communicator",
                                     registered, registered > 1 ? "s" : ""),
                         "destroy them first, on all ranks");
}

void nccl_communicator::state::find_window_bytes(std::size_t wanted, stride_setting& stride) {
  struct offer {
    std::size_t memory, stride, wanted;
  };
  offer mine{};
  agree_on(*ranks, "nccl_communicator: environment", [&] {
    mine = {on->describe(device).total_bytes, stride_from_environment().value_or(0), wanted};
    if (wanted == 0 || mine.stride >= wanted) return;
    const std::string set =
        fmt::format("{}={} ({})", k_stride, mine.stride, format_bytes(mine.stride));
    if (environment_was_read()) {
      throw invalid_argument(
          fmt::format("window_bytes is {}, but NCCL has read its environment, {}",
                      format_bytes(wanted),
                      mine.stride > 0 ? "with " + set : "where NCCL_WIN_STRIDE is not set"),
          "give the process's first communicator the largest window_bytes, or set "
          "NCCL_WIN_STRIDE before the program starts");
    }
    if (mine.stride > 0) {
      throw invalid_argument(fmt::format("window_bytes is {}, but {}", format_bytes(wanted), set),
                             "unset NCCL_WIN_STRIDE or raise it");
    }
    mine.stride = round_up(wanted, k_stride_unit);
    stride.set(mine.stride);
  });
  const auto offers = ranks->all_gather_value(mine, "nccl_communicator: window_bytes");
  for (std::size_t r = 0; r < offers.size(); ++r) {
    if (offers[r].stride != offers[0].stride) {
      throw invalid_argument(
          fmt::format("NCCL_WIN_STRIDE, which window_bytes sets, is {} on rank 0 and {} on rank {}",
                      offers[0].stride, offers[r].stride, r),
          "give every rank the same");
    }
    window_bytes = std::max(window_bytes, std::max(offers[r].memory, offers[r].stride));
  }
  if (mine.stride > 0) window_bytes = mine.stride;
  window_bytes = round_up(window_bytes, k_stride_unit);
}

void nccl_communicator::state::create(const nccl_options& options) {
  device = options.device;
  ours = true;
  stride_setting stride;
  find_window_bytes(options.window_bytes, stride);
  nccl_unique_id id;
  agree_on(*ranks, "nccl_communicator: unique id", [&] {
    if (ranks->rank() == rank_id{0}) call("ncclGetUniqueId", api.get_unique_id(&id));
  });
  const auto shared = ranks->broadcast(std::as_bytes(std::span{id.bytes}), rank_id{0},
                                       "nccl_communicator: unique id");
  std::memcpy(id.bytes, shared.data(), std::min(shared.size(), sizeof(id.bytes)));
  agree_on(*ranks, "nccl_communicator: start", [&] {
    const device_scope current(*on, device);
    environment_was_read() = true;
    stride.keep();
    nccl_config config{.blocking = options.blocking ? 1 : 0};
    collective_call("ncclCommInitRankConfig", [&] {
      return api.comm_init(&comm, ranks->size(), id, ranks->rank().value, &config);
    });
  });
}

void nccl_communicator::state::adopt(ncclComm* theirs) {
  agree_on(*ranks, "nccl_communicator: adopt", [&] {
    if (theirs == nullptr) throw invalid_argument("the communicator to adopt is null");
    comm = theirs;
    settle("the communicator to adopt");
    int size = 0;
    int rank = 0;
    call("ncclCommCount", api.comm_count(comm, &size));
    call("ncclCommUserRank", api.comm_rank(comm, &rank));
    call("ncclCommCuDevice", api.comm_device(comm, &device.value));
    if (size != ranks->size() || rank != ranks->rank().value) {
      throw invalid_argument(
          fmt::format("the communicator to adopt has this as rank {} of {}, the bootstrap as "
                      "rank {} of {}",
                      rank, size, ranks->rank().value, ranks->size()),
          "give it a bootstrap over the same ranks in the same order");
    }
  });
  environment_was_read() = true;
  stride_setting untouched;
  find_window_bytes(0, untouched);
}

void nccl_communicator::state::close() {
  if (closed) return;
  agree_on(*ranks, "nccl_communicator: may close", [&] {
    check_bare();
    if (ours) check_usable();
  });
  try {
    agree_on(*ranks, "nccl_communicator: close", [&] {
      if (!ours) return;
      collective_call("ncclCommFinalize", [&] { return api.comm_finalize(comm); });
      call("ncclCommDestroy", api.comm_destroy(std::exchange(comm, nullptr)));
    });
  } catch (const std::exception& failure) {
    share_breakage(failure.what());  // where it went well it is gone
    throw;
  }
  closed = true;
}

void nccl_communicator::state::all_reduce(std::string_view doing, address at, std::size_t count,
                                          native_stream stream) {
  auto* const words = reinterpret_cast<void*>(at);
  const device_scope current(*on, device);
  collective_call(doing, [&] {
    return api.all_reduce(words, words, count, nccl_float32, nccl_sum, comm, stream);
  });
  or_break([&] { wait_until(doing, [&] { return on->idle(stream); }); });
}

void nccl_communicator::state::warm_up() {
  if (warm) return;
  const native_stream stream = on->create_stream(device);
  address at = 0;
  const auto clean_up = [&]() noexcept {
    if (at != 0) log_failure("freeing a word", [&] { on->free_async(at, stream); });
    log_failure("destroying a stream", [&] { on->destroy_stream(stream); });
  };
  try {
    const device_scope current(*on, device);
    at = on->allocate_async(device, sizeof(float), stream);
    on->fill(at, std::byte{0}, sizeof(float), stream);
    on->synchronize(stream);
    all_reduce("the first ncclAllReduce", at, 1, stream);
  } catch (...) {
    clean_up();
    throw;
  }
  clean_up();
  warm = true;
}

// --- the public face ------------------------------------------------------------------------

nccl_communicator::nccl_communicator(std::shared_ptr<bootstrap> ranks, std::shared_ptr<driver> on,
                                     const nccl_options& options)
    : state_(std::make_shared<state>(std::move(ranks), std::move(on))) {
  state_->create(options);
}
nccl_communicator::nccl_communicator(ncclComm* theirs, std::shared_ptr<bootstrap> ranks,
                                     std::shared_ptr<driver> on)
    : state_(std::make_shared<state>(std::move(ranks), std::move(on))) {
  state_->adopt(theirs);
}
nccl_communicator::nccl_communicator(nccl_communicator&&) noexcept = default;
nccl_communicator& nccl_communicator::operator=(nccl_communicator&&) noexcept = default;
nccl_communicator::~nccl_communicator() = default;

void nccl_communicator::close() {
  state_->close();
}
ncclComm* nccl_communicator::get() const {
  state_->check_usable();
  return state_->comm;
}
void nccl_communicator::settle(const char* doing) {
  state_->check_usable();
  state_->collective_call(doing, [] { return int{nccl_success}; });
}
device_id nccl_communicator::device() const noexcept {
  return state_->device;
}
int nccl_communicator::version() const noexcept {
  return state_->version;
}
const std::string& nccl_communicator::library() const noexcept {
  return state_->library;
}
std::string nccl_communicator::why_not(nccl_ability ability) const {
  return state_->why_not(ability);
}
std::vector<nccl_finding> nccl_communicator::probe() {
  return state_->probe();
}
std::size_t nccl_communicator::window_bytes() const noexcept {
  return state_->window_bytes;
}
std::size_t nccl_communicator::window_bytes_taken() const noexcept {
  return state_->taken_bytes;
}
bootstrap& nccl_communicator::ranks() const noexcept {
  return *state_->ranks;
}

}  // namespace evmm
