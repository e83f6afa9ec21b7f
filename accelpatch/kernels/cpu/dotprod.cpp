#define AP_KERNELS dotprod_kernels
#include "kernels.inc"
