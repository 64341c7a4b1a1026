// SPDX-License-Identifier: Apache-2.0
#include "lib/cli/sharing_checks.hpp"

#include "lib/support/text_file.hpp"

#include <evmm/unique_fd.hpp>

#include <fmt/format.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstring>
#include <string>
#include <system_error>

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

namespace evmm::cli {

namespace {

std::string text_of(int failure) {
  return failure == 0 ? "works" : "refused: " + std::generic_category().message(failure);
}

/// The number after "key:" in a /proc status file.
std::optional<int> status_number(std::string_view text, std::string_view key) {
  const auto at = text.find("\n" + std::string(key) + ":");
  if (at == text.npos) return std::nullopt;
  const auto digits = text.find_first_of("0123456789", at);
  int value = 0;
  if (digits == text.npos) return std::nullopt;
  std::from_chars(text.data() + digits, text.data() + text.size(), value);
  return value;
}

/// Passes a descriptor to itself as ranks pass theirs: over an abstract socket, with credentials.
/// Returns the errno of the step that failed.
int pass_descriptor() {
  const unique_fd listener(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const unique_fd sender(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!listener || !sender) return errno;
  struct sockaddr_un name {};
  name.sun_family = AF_UNIX;
  // Bound without a name, the kernel gives it an abstract one.
  socklen_t length = sizeof name.sun_family;
  auto* const any_name = reinterpret_cast<struct sockaddr*>(&name);
  if (::bind(listener.get(), any_name, length) != 0) return errno;
  length = sizeof name;
  if (::getsockname(listener.get(), any_name, &length) != 0) return errno;
  if (::listen(listener.get(), 1) != 0) return errno;
  if (::connect(sender.get(), any_name, length) != 0) return errno;
  const unique_fd receiver(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!receiver) return errno;
  struct ucred peer {};
  socklen_t peer_length = sizeof peer;
  if (::getsockopt(receiver.get(), SOL_SOCKET, SO_PEERCRED, &peer, &peer_length) != 0) return errno;

  char byte = 'x';
  struct iovec data {
    &byte, 1
  };
  alignas(struct cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  struct msghdr message {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  struct cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  const int passed = sender.get();
  std::memcpy(CMSG_DATA(header), &passed, sizeof passed);
  if (::sendmsg(sender.get(), &message, MSG_NOSIGNAL) != 1) return errno;

  control.fill(0);
  message.msg_controllen = control.size();
  if (::recvmsg(receiver.get(), &message, MSG_CMSG_CLOEXEC) != 1) return errno;
  header = CMSG_FIRSTHDR(&message);
  if (header == nullptr || header->cmsg_type != SCM_RIGHTS) return EBADMSG;
  int arrived = -1;
  std::memcpy(&arrived, CMSG_DATA(header), sizeof arrived);
  const unique_fd owned(arrived);
  return owned ? 0 : EBADF;
}

int fetch_own_descriptor() {
  const unique_fd self(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
  if (!self) return errno;
  const unique_fd fetched(static_cast<int>(::syscall(SYS_pidfd_getfd, self.get(), 0, 0)));
  // Without a descriptor 0 the call was still let through.
  return fetched || errno == EBADF ? 0 : errno;
}

int set_memory_policy() {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  void* const at =
      ::mmap(nullptr, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return errno;
  const long result = ::syscall(SYS_mbind, at, page, MPOL_LOCAL, nullptr, 0UL, 0U);
  const int failure = result == 0 ? 0 : errno;
  ::munmap(at, page);
  return failure;
}

}  // namespace

finding judge_descriptor_passing(int failure) {
  finding result{.found = text_of(failure)};
  if (failure == 0) return result;
  result.level = status::fail;
  result.meaning = "ranks of a node pass the descriptors of their memory over such sockets";
  result.remedy = "allow AF_UNIX sockets in the sandbox; ranks must share a network namespace";
  return result;
}

finding judge_pidfd(int failure) {
  finding result{.found = text_of(failure)};
  if (failure != 0) {
    result.meaning =
        "not needed: evmm passes descriptors over sockets; programs that fetch them "
        "from each other fail here";
  }
  return result;
}

finding judge_ptrace_scope(std::optional<int> scope) {
  if (!scope) return {.found = "no Yama"};
  finding result{.found = fmt::format("kernel.yama.ptrace_scope={}", *scope)};
  if (*scope == 0) return result;
  result.level = *scope == 1 ? status::ok : status::warn;
  result.meaning =
      "evmm does not need it; MPI's single-copy transfers between processes fall back "
      "to slower ones";
  if (*scope != 1) result.remedy = "sysctl kernel.yama.ptrace_scope=1";
  return result;
}

finding judge_sandbox(std::string_view status_text) {
  const int filters = status_number(status_text, "Seccomp").value_or(0);
  const int no_new_privileges = status_number(status_text, "NoNewPrivs").value_or(0);
  finding result{.found = fmt::format("seccomp {}, no_new_privs {}",
                                      filters == 0 ? "off" : "mode " + std::to_string(filters),
                                      no_new_privileges)};
  if (filters == 1) {
    result.level = status::fail;
    result.meaning = "strict mode lets a process read, write and exit only";
    result.remedy = "run without strict seccomp";
  } else if (filters != 0) {
    result.meaning = "what the filter refuses shows in the checks that try it";
  }
  return result;
}

finding judge_memory_policy(int failure) {
  finding result{.found = text_of(failure)};
  if (failure == 0) return result;
  result.level = status::warn;
  result.meaning =
      "the host driver cannot bind pages to a NUMA node; CUDA's HOST_NUMA is bound by "
      "the driver and is not affected";
  result.remedy = failure == ENOSYS ? "this kernel has no NUMA; nothing to do"
                                    : "docker run --cap-add SYS_NICE";
  return result;
}

finding judge_memfd(int failure) {
  finding result{.found = text_of(failure)};
  if (failure == 0) return result;
  result.level = status::warn;
  result.meaning = "the host driver, which stands in where there is no GPU, takes its memory there";
  result.remedy = "allow memfd_create in the sandbox";
  return result;
}

finding check_descriptor_passing() {
  return judge_descriptor_passing(pass_descriptor());
}

finding check_pidfd() {
  return judge_pidfd(fetch_own_descriptor());
}

finding check_ptrace_scope() {
  const auto text = read_line("/proc/sys/kernel/yama/ptrace_scope");
  if (!text || text->empty()) return judge_ptrace_scope(std::nullopt);
  return judge_ptrace_scope((*text)[0] - '0');
}

finding check_sandbox() {
  return judge_sandbox(read_text("/proc/self/status").value_or(""));
}

finding check_memory_policy() {
  return judge_memory_policy(set_memory_policy());
}

finding check_memfd() {
  const unique_fd made(::memfd_create("evmm-doctor", MFD_CLOEXEC));
  return judge_memfd(made ? 0 : errno);
}

}  // namespace evmm::cli
