// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/comm/bootstrap.hpp>
#include <evmm/driver.hpp>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

struct ncclComm;  // ncclComm_t points to one

namespace [[gnu::visibility("default")]] evmm {

/// What NCCL learnt over time and windows depend on.
enum class nccl_ability : std::uint8_t {
  user_buffers,      ///< ncclCommRegister
  windows,           ///< ncclCommWindowRegister
  several_segments,  ///< one window over several handles; older ones map the first alone, silently
  host_segments,     ///< HOST_NUMA memory in a window
  host_segments_over_network,  ///< and for peers that GIN reaches
  peer_pointers,               ///< the host can ask for a peer's address (ncclGetPeerDevicePointer)
  gin,                         ///< evmm's kernels can put over the network, if there is one for it
};
/// "windows over several segments" and so on.
const char* to_string(nccl_ability ability) noexcept;
/// The first version that has it: 23003 for 2.30.3.
int nccl_version_with(nccl_ability ability) noexcept;

/// What nccl_communicator::probe() found of one ability.
struct nccl_finding {
  nccl_ability ability{};
  bool tried = false;        ///< false: the answer is why_not()'s alone
  std::string why_not = {};  ///< why it does not work; empty when it does
  bool works() const noexcept { return why_not.empty(); }
};

/// What a communicator is created with; all ranks give the same but for `device`.
struct nccl_options {
  /// This rank's device.
  device_id device{0};
  /// Addresses that NCCL keeps a rank for its windows, all together: NCCL_WIN_STRIDE, in which case
  /// this sets it. 0 leaves the variable as it is; unset, it means the memory of the largest GPU.
  std::size_t window_bytes = 0;
  /// NCCL's own way: every call on the communicator blocks until it is done, without a deadline,
  /// and none returns ncclInProgress.
  bool blocking = false;
};

/// An NCCL communicator over the ranks of a bootstrap, created here or adopted from its user. NCCL
/// is found at run time: the one that the program has loaded, else the file that EVMM_NCCL_LIBRARY
/// names, else libnccl.so.2.
///
/// Units: bytes.
/// Threads: one at a time.
/// Streams: creating synchronises with the other ranks; nothing here waits for a user's stream.
/// Errors: of a collective call all ranks throw the same. NCCL does not survive a failed collective
///   call: the communicator is broken then, and every later use a peer_error that says by what. One
///   created here is aborted at once, so that nothing of it reaches memory any more, and without
///   `blocking` ends every step by half the bootstrap's timeout, with timed_out. On an adopted one
///   that blocks, NCCL waits as long as it likes.
class nccl_communicator {
 public:
  /// Creates one. Collective. Throws unsupported without NCCL; invalid_argument when `window_bytes`
  /// contradicts NCCL_WIN_STRIDE, or comes after the process's first communicator: NCCL reads its
  /// environment once.
  nccl_communicator(std::shared_ptr<bootstrap> ranks, std::shared_ptr<driver> on,
                    const nccl_options& options = {});
  /// Adopts one whose ranks are those of the bootstrap; it stays the caller's to destroy, after
  /// this object and every window on it. Collective. Throws invalid_argument when its size or its
  /// rank differs from the bootstrap's.
  nccl_communicator(ncclComm* theirs, std::shared_ptr<bootstrap> ranks, std::shared_ptr<driver> on);
  nccl_communicator(nccl_communicator&&) noexcept;
  nccl_communicator& operator=(nccl_communicator&&) noexcept;
  /// Local. One created here is aborted unless it was closed; windows keep it until they are gone.
  ~nccl_communicator();

  /// Collective: finishes and destroys one created here, lets go of one adopted. Every other use is
  /// an invalid_argument afterwards. Throws invalid_argument while windows are on it.
  void close();

  /// The communicator itself, for NCCL's calls. Throws peer_error when it is broken.
  ncclComm* get() const;
  /// After a call of NCCL that may still be under way (`doing` names it in errors): returns when it
  /// is done. Throws timed_out, or what it failed with; both break the communicator.
  void settle(const char* doing);

  device_id device() const noexcept;
  /// Of the NCCL that was found at run time: 22809 for 2.28.9.
  int version() const noexcept;
  /// The file that it lies in.
  const std::string& library() const noexcept;
  /// Why the loaded NCCL, as its environment is set, lacks an ability, or what the latest probe()
  /// found in its way; empty when it has it.
  std::string why_not(nccl_ability ability) const;
  /// Finds out by doing what works between these ranks, for each ability in the order of the enum
  /// and the same on all ranks: what fails on one works on none, and the text names the rank. Each
  /// is tried with a region of one or two of the smallest segments, on a communicator made for it
  /// (one that does not block), and the bytes are compared: NCCL fails in silence too. A failure
  /// takes down nothing else, what is left is tried on a new communicator, and everything is freed.
  /// Of this communicator only why_not() changes, and with it what windows and user buffers are
  /// refused with; the next probe() forgets that again.
  ///
  /// Not tried is what why_not() knows to be missing, since older versions crash or corrupt there;
  /// and what goes by GIN, which is `gin`, `host_segments_over_network` and, with ranks on several
  /// nodes, `host_segments`: only kernels that put to other nodes could show it, and no deadline
  /// ends one where the network does not deliver.
  ///
  /// Collective; let nothing of NCCL's run meanwhile. Each step takes at most the bootstrap's
  /// timeout. Throws invalid_argument while windows or user buffers are on this communicator, and
  /// timed_out or peer_error where the ranks lose each other. A kernel of NCCL's that faults takes
  /// the process's CUDA context along.
  std::vector<nccl_finding> probe();
  /// Addresses a rank for all windows together, and how much of them windows take.
  std::size_t window_bytes() const noexcept;
  std::size_t window_bytes_taken() const noexcept;
  bootstrap& ranks() const noexcept;

  /// Inside of the library.
  struct state;
  const std::shared_ptr<state>& shared() const noexcept { return state_; }

 private:
  std::shared_ptr<state> state_;
};

}  // namespace evmm
