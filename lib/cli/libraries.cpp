// SPDX-License-Identifier: Apache-2.0
#include "lib/cli/libraries.hpp"

#include "lib/support/environment.hpp"
#include "lib/support/nccl_version.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>

#include <dlfcn.h>

// Only for their version numbers: neither is linked, so that the program starts without them.
#ifdef EVMM_HAVE_NCCL
#include <nccl.h>
#endif
#ifdef EVMM_HAVE_MPI
#include <mpi.h>
#endif

namespace evmm::cli {

namespace {

/// The first of several names that can be loaded. Never unloaded: libraries of this kind leave
/// threads and handlers behind.
void* load_first(std::initializer_list<const char*> names, library_versions& report) {
  for (const char* name : names) {
    if (void* const library = ::dlopen(name, RTLD_LAZY | RTLD_LOCAL); library != nullptr) {
      report.why_not.clear();
      return library;
    }
    // NOLINTNEXTLINE(concurrency-mt-unsafe): glibc keeps the text per thread
    if (report.why_not.empty()) report.why_not = ::dlerror();
  }
  return nullptr;
}

/// A function of the library; the file it lies in goes into the report.
template <class Function>
Function find(void* library, const char* name, library_versions& report) {
  void* const symbol = ::dlsym(library, name);
  Dl_info where{};
  if (symbol != nullptr && ::dladdr(symbol, &where) != 0) report.path = where.dli_fname;
  if (symbol == nullptr) report.why_not = fmt::format("it has no {}", name);
  return reinterpret_cast<Function>(symbol);
}

}  // namespace

std::string cuda_compiled() {
#ifdef EVMM_CUDA_VERSION
  return EVMM_CUDA_VERSION;
#else
  return {};
#endif
}

library_versions look_for_nccl() {
  library_versions report;
#ifdef EVMM_HAVE_NCCL
  report.compiled = nccl_version_text(NCCL_VERSION_CODE);
#endif
  // As evmm's own code looks for it, in a program that has none yet.
  const std::optional<std::string> named = environment("EVMM_NCCL_LIBRARY");
  void* const library = load_first({named ? named->c_str() : "libnccl.so.2"}, report);
  if (library == nullptr) return report;
  const auto get_version = find<int (*)(int*)>(library, "ncclGetVersion", report);
  int code = 0;
  if (get_version != nullptr && get_version(&code) == 0) report.found = nccl_version_text(code);
  return report;
}

library_versions look_for_mpi() {
  library_versions report;
#ifdef EVMM_HAVE_MPI
#ifdef OMPI_MAJOR_VERSION
  report.compiled = fmt::format("Open MPI {}.{}.{}", OMPI_MAJOR_VERSION, OMPI_MINOR_VERSION,
                                OMPI_RELEASE_VERSION);
#else
  report.compiled = fmt::format("MPI {}.{}", MPI_VERSION, MPI_SUBVERSION);
#endif
#endif
  void* const library = load_first({"libmpi.so.40", "libmpi.so.12", "libmpi.so"}, report);
  if (library == nullptr) return report;
  // One of the few functions that may be called before MPI is initialised.
  const auto get_version = find<int (*)(char*, int*)>(library, "MPI_Get_library_version", report);
  std::array<char, 8192> text{};  // MPI_MAX_LIBRARY_VERSION_STRING of the MPIs there are
  int length = 0;
  if (get_version == nullptr || get_version(text.data(), &length) != 0) return report;
  report.found = text.data();
  // "Open MPI v4.1.4, package: ..., or several lines: the first item says which it is.
  report.found.resize(std::min(report.found.size(), report.found.find_first_of(",\n")));
  return report;
}

}  // namespace evmm::cli
