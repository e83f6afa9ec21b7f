#define AP_KERNELS avx512_kernels
#include "kernels.inc"
