// int4 weights in groups of 64.
#include "gemv_int4.h"

int gemv_int4_groups_of_64(const GemvArgs& a, int dtype, GpuStream s) { return by_dtype<2>(a, dtype, s); }
