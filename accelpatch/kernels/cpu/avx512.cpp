#define AP_TABLE avx512_kernels
#include "kernels.inc"
