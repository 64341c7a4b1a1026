/* SPDX-License-Identifier: Apache-2.0 */
/* A C program of a user, on libevmm_torch.so. */
#include <evmm/torch.h>

#include <stdio.h>

int main(void) {
  void* const at = evmm_torch_alloc(1000, 0, NULL);
  char statistics[1 << 14];
  if (at == NULL || evmm_torch_statistics(0, statistics, sizeof statistics) < 0) {
    fprintf(stderr, "torch_consumer: %s\n", evmm_torch_last_error());
    return 1;
  }
  evmm_torch_free(at, 1000, 0, NULL);
  printf("evmm_torch %s works\n", evmm_torch_version());
  return 0;
}
