#define AP_TABLE portable_kernels
#include "kernels.inc"
