// SPDX-License-Identifier: Apache-2.0
// A program that preloads libevmm_ncclmem.so and loads NCCL for itself alone, as Python does with
// the libraries of its modules: what is not evmm's goes to that NCCL.
#include <cstdio>

#include <dlfcn.h>

int main(int, char** arguments) {
  if (::dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL) == nullptr) return 2;
  const auto free = reinterpret_cast<int (*)(void*)>(::dlsym(RTLD_DEFAULT, "ncclMemFree"));
  int word = 0;
  const int result = free != nullptr ? free(&word) : -1;
  std::printf("ncclMemFree: %d\n", result);
  return result == 4 ? 0 : 1;  // ncclInvalidArgument of the fake
}
