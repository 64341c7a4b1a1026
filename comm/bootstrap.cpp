// SPDX-License-Identifier: Apache-2.0
#include "comm/ranks_text.hpp"
#include "comm/wire.hpp"
#include "lib/support/environment.hpp"
#include "lib/support/log.hpp"
#include "lib/support/step_timeout.hpp"

#include <evmm/comm/bootstrap.hpp>

#include <fmt/format.h>

#include <array>
#include <fstream>
#include <map>
#include <utility>

#include <unistd.h>

namespace evmm {

namespace {

constexpr std::uint32_t k_frame_magic = 0x65766d31;  // "evm1"; changes with the frame's layout

constexpr std::array<std::string_view, 4> k_call_names = {"all_gather", "barrier", "broadcast",
                                                          "agree"};

/// How messages speak of a step: "agree 'grow'", or "barrier" when it has no name of its own.
std::string describe(std::size_t kind, std::string_view step) {
  const std::string_view name = kind < k_call_names.size() ? k_call_names[kind] : "unknown call";
  return step == name ? std::string(name) : fmt::format("{} '{}'", name, step);
}

/// What a rank puts before its bytes, so that ranks which make different calls find out.
struct frame {
  std::uint64_t sequence = 0;
  std::uint8_t kind = 0;
  std::string step;
  std::span<const std::byte> payload;

  bool same_call(const frame& other) const {
    return sequence == other.sequence && kind == other.kind && step == other.step;
  }
  std::string text() const { return fmt::format("{} (step {})", describe(kind, step), sequence); }
};

frame read_frame(std::span<const std::byte> bytes, int rank) {
  wire_reader in(bytes, fmt::format("rank {}", rank));
  if (in.get<std::uint32_t>() != k_frame_magic) {
    throw peer_error(
        fmt::format("what came from rank {} is not a message of this version of evmm", rank),
        "run the same evmm on all ranks, and use the gather it was given for nothing else");
  }
  frame read;
  read.sequence = in.get<std::uint64_t>();
  read.kind = in.get<std::uint8_t>();
  read.step = in.get_text();
  read.payload = in.rest();
  return read;
}

/// Every rank compares with rank 0, so that all find the same difference.
void require_same_call(const std::vector<frame>& frames) {
  const frame* other = nullptr;
  std::vector<int> ranks;
  for (std::size_t i = 1; i < frames.size(); ++i) {
    if (frames[i].same_call(frames[0])) continue;
    if (other == nullptr) other = &frames[i];
    if (frames[i].same_call(*other)) ranks.push_back(static_cast<int>(i));
  }
  if (other == nullptr) return;
  throw peer_error(fmt::format("ranks make different calls: rank 0 is in {}, {} in {}",
                               frames[0].text(), ranks_text(ranks), other->text()),
                   "collective calls must be made by all ranks in the same order");
}

/// Throws the error of the lowest rank that has one, as agree() promises. Verdicts are by rank, and
/// empty where nothing failed.
void throw_lowest(const std::vector<byte_vector>& verdicts) {
  std::optional<wire_error> told;
  int others = -1;
  for (std::size_t r = 0; r < verdicts.size(); ++r) {
    const byte_vector& verdict = verdicts[r];
    if (verdict.empty()) continue;
    ++others;
    wire_reader in(verdict, fmt::format("rank {}", r));
    auto failure = get_error(in);
    // A rank that waited in vain tells nothing of what kept the other.
    if (told && (told->category != error_category::timed_out ||
                 failure.category == error_category::timed_out)) {
      continue;
    }
    failure.info.message = fmt::format("rank {}: {}", r, failure.info.message);
    told = std::move(failure);
  }
  if (!told) return;
  if (others > 0) {
    told->info.message +=
        fmt::format(" (and {} more rank{} failed)", others, others > 1 ? "s" : "");
  }
  throw_error(told->category, std::move(told->info));
}

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string link_target(const char* path) {
  std::array<char, 256> target{};
  const auto size = ::readlink(path, target.data(), target.size());
  return size > 0 ? std::string(target.data(), static_cast<std::size_t>(size)) : std::string();
}

}  // namespace

bootstrap::bootstrap(rank_id rank, int size)
    : rank_(rank), size_(size), timeout_(k_default_timeout) {
  if (size < 1 || rank.value < 0 || rank.value >= size) {
    throw invalid_argument(fmt::format("rank {} of {} ranks", rank.value, size),
                           "ranks count from 0 to size - 1");
  }
  try {
    timeout_ = timeout_from_environment();
  } catch (const invalid_argument&) {
    // The other ranks wait for this one: find_nodes() tells them all, set_nodes() this one.
  }
}

void bootstrap::set_timeout(milliseconds timeout) {
  if (timeout.count() < 1 || timeout.count() > k_longest_timeout) {
    throw invalid_argument(fmt::format("a timeout of {} ms", timeout.count()),
                           fmt::format("it takes 1 to {} ms", k_longest_timeout));
  }
  timeout_ = timeout;
}

std::vector<byte_vector> bootstrap::framed_gather(call kind, std::string_view step,
                                                  std::span<const std::byte> mine) {
  const auto what = describe(static_cast<std::size_t>(kind), step);
  if (broken()) {
    throw peer_error(fmt::format("{} cannot start: {}", what, broken_by_),
                     "make a new bootstrap, without the ranks that were lost");
  }
  wire_writer out;
  out.put(k_frame_magic).put(sequence_++).put(kind).put_text(step).append(mine);
  const auto deadline = std::chrono::steady_clock::now() + timeout_;
  std::vector<byte_vector> gathered;
  std::vector<frame> frames;
  try {
    gathered = gather(out.take(), deadline, what);
    if (gathered.size() != static_cast<std::size_t>(size_)) {
      throw peer_error(
          fmt::format("{} gave {} messages for {} ranks", what, gathered.size(), size_));
    }
    for (int r = 0; r < size_; ++r) {
      frames.push_back(read_frame(gathered[static_cast<std::size_t>(r)], r));
    }
  } catch (const error& failure) {
    broken_by_ = "an earlier step failed: " + failure.message();
    throw;
  } catch (const std::exception& failure) {
    broken_by_ = "an earlier step failed: " + std::string(failure.what());
    throw peer_error(fmt::format("{} failed on rank {}: {}", what, rank_.value, failure.what()));
  } catch (...) {
    broken_by_ = "an earlier step failed";
    throw peer_error(fmt::format("{} failed on rank {}", what, rank_.value));
  }
  require_same_call(frames);
  for (std::size_t i = 0; i < gathered.size(); ++i) {
    const auto header = gathered[i].size() - frames[i].payload.size();
    gathered[i].erase(gathered[i].begin(),
                      gathered[i].begin() + static_cast<std::ptrdiff_t>(header));
  }
  return gathered;
}

std::vector<byte_vector> bootstrap::all_gather(std::span<const std::byte> mine,
                                               std::string_view step) {
  return framed_gather(call::all_gather, step, mine);
}

void bootstrap::barrier(std::string_view step) {
  framed_gather(call::barrier, step, {});
}

byte_vector bootstrap::broadcast(std::span<const std::byte> bytes, rank_id root,
                                 std::string_view step) {
  wire_writer out;
  out.put(root);
  if (root == rank_) out.append(bytes);
  const auto gathered = framed_gather(call::broadcast, step, out.take());
  byte_vector result;
  rank_id first_root;
  for (int r = 0; r < size_; ++r) {
    wire_reader in(gathered[static_cast<std::size_t>(r)], fmt::format("rank {}", r));
    const auto named = in.get<rank_id>();
    if (named.value < 0 || named.value >= size_) {
      throw invalid_argument(fmt::format("{}: rank {} expects it from rank {} of {} ranks",
                                         describe(static_cast<std::size_t>(call::broadcast), step),
                                         r, named.value, size_));
    }
    if (r == 0) first_root = named;
    if (named != first_root) {
      throw peer_error(fmt::format("{}: rank 0 expects it from rank {}, rank {} from rank {}",
                                   describe(static_cast<std::size_t>(call::broadcast), step),
                                   first_root.value, r, named.value));
    }
    if (r == root.value) {
      const auto data = in.rest();
      result.assign(data.begin(), data.end());
    }
  }
  return result;
}

void bootstrap::agree(std::exception_ptr mine, std::string_view step) {
  wire_writer out;
  if (mine != nullptr) {
    const auto verdict = describe_error(mine);
    put_error(out, verdict.category, verdict.info);
  }
  std::vector<byte_vector> verdicts;
  try {
    verdicts = framed_gather(call::agree, step, out.take());
  } catch (...) {
    // The lost step is what all ranks have in common; what went wrong here is not to be forgotten.
    if (mine != nullptr) {
      log().error("rank {} could not report its own failure: {}", rank_.value,
                  describe_error(mine).info.message);
    }
    throw;
  }
  throw_lowest(verdicts);
}

std::shared_ptr<node_link> bootstrap::make_link() {
  throw unsupported("this bootstrap knows no way for bytes to ranks of other nodes",
                    "use make_mpi_bootstrap, or give channel_options::link");
}

std::string bootstrap::host_identity() {
  const auto boot = first_line("/proc/sys/kernel/random/boot_id");
  const auto network = link_target("/proc/self/ns/net");
  const auto processes = link_target("/proc/self/ns/pid");
  if (boot.empty() || network.empty() || processes.empty()) {
    throw unsupported("cannot tell which host this is: /proc has no boot id or no namespaces",
                      "mount /proc");
  }
  return boot + ' ' + network + ' ' + processes + ' ' +
         environment("EVMM_HOST_ID").value_or(std::string());
}

void bootstrap::find_nodes() {
  wire_writer mine;
  try {
    static_cast<void>(timeout_from_environment());
    mine.put_text(host_identity());
  } catch (...) {
    const auto why = describe_error(std::current_exception());
    mine.put_text({});
    put_error(mine, why.category, why.info);
  }
  const auto gathered = all_gather(mine.take(), "find_nodes");
  std::vector<std::string> identities;
  std::vector<byte_vector> verdicts;
  for (std::size_t r = 0; r < gathered.size(); ++r) {
    wire_reader in(gathered[r], fmt::format("rank {}", r));
    identities.push_back(in.get_text());
    const auto verdict = in.rest();
    verdicts.emplace_back(verdict.begin(), verdict.end());
  }
  throw_lowest(verdicts);
  set_nodes(identities);
}

void bootstrap::set_nodes(std::span<const std::string> identities) {
  static_cast<void>(timeout_from_environment());
  std::map<std::string_view, int> numbers;
  nodes_.clear();
  for (const auto& identity : identities) {
    nodes_.push_back(numbers.try_emplace(identity, static_cast<int>(numbers.size())).first->second);
  }
  node_count_ = static_cast<int>(numbers.size());
  node_ranks_.clear();
  for (int r = 0; r < size_; ++r) {
    if (nodes_[static_cast<std::size_t>(r)] != node()) continue;
    if (r == rank_.value) node_rank_ = static_cast<int>(node_ranks_.size());
    node_ranks_.push_back(rank_id{r});
  }
}

}  // namespace evmm
