// int4 weights in groups of 32.
#include "gemv_int4.h"

int gemv_int4_groups_of_32(const GemvArgs& a, int dtype, GpuStream s) { return by_dtype<4>(a, dtype, s); }
