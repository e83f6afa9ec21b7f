#define AP_TABLE avx2_kernels
#include "kernels.inc"
