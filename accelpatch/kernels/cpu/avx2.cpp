#define AP_KERNELS avx2_kernels
#include "kernels.inc"
