#define AP_KERNELS portable_kernels
#include "kernels.inc"
