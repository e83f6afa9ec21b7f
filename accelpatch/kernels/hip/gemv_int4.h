// int4 products by kind of offset and dtype. Each group size is a source of its own: together they take a compiler
// minutes.
#pragma once
#include "gemv_host.h"

template <int GROUPS, class T> int by_offset(const GemvArgs& a, GpuStream s) {
    if (a.offset_kind == OFFSET_NONE) return launch_all<Int4<GROUPS, OFFSET_NONE>, T>(a, s);
    if (a.offset_kind == OFFSET_ZERO_POINT) return launch_all<Int4<GROUPS, OFFSET_ZERO_POINT>, T>(a, s);
    return launch_all<Int4<GROUPS, OFFSET_MINIMUM>, T>(a, s);
}
// dtype: 0 bf16, 1 fp16 activations.
template <int GROUPS> int by_dtype(const GemvArgs& a, int dtype, GpuStream s) {
    return dtype ? by_offset<GROUPS, F16>(a, s) : by_offset<GROUPS, Bf16>(a, s);
}

int gemv_int4_groups_of_32(const GemvArgs& a, int dtype, GpuStream s);
int gemv_int4_groups_of_64(const GemvArgs& a, int dtype, GpuStream s);
