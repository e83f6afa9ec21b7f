// int4 weights in tiles, packed 16-bit scales and offsets. GROUPS: scales of a step of 128 values of K. Each group size
// is a source of its own: together they take a compiler minutes.
#pragma once
#include "gemv_host.h"
#include "instances.h"

template <int GROUPS, class T> int by_offset(const GemvArgs& a, GpuStream s) {
    if constexpr (HAS<OFFSET_NONE>) {
        if (a.offset_kind == OFFSET_NONE) return launch_all<Int4<GROUPS, OFFSET_NONE>, T>(a, s);
    }
    if constexpr (HAS<OFFSET_ZERO_POINT>) {
        if (a.offset_kind == OFFSET_ZERO_POINT) return launch_all<Int4<GROUPS, OFFSET_ZERO_POINT>, T>(a, s);
    }
    if constexpr (HAS<OFFSET_MINIMUM>) {
        if (a.offset_kind == OFFSET_MINIMUM) return launch_all<Int4<GROUPS, OFFSET_MINIMUM>, T>(a, s);
    }
    if constexpr (GROUPS > 1 && HAS<OFFSET_NF4>) {
        if (a.offset_kind == OFFSET_NF4) return launch_all<Codebook4<GROUPS, OFFSET_NF4>, T>(a, s);
    }
    if constexpr (GROUPS > 1 && HAS<OFFSET_FP4>) {
        if (a.offset_kind == OFFSET_FP4) return launch_all<Codebook4<GROUPS, OFFSET_FP4>, T>(a, s);
    }
    if constexpr (GROUPS == 4 && HAS<OFFSET_E2M1>) {
        if (a.offset_kind == OFFSET_E2M1) return launch_all<Codebook4<GROUPS, OFFSET_E2M1>, T>(a, s);
    }
    if constexpr (GROUPS == 4 && HAS<OFFSET_NVFP4>) {
        if (a.offset_kind == OFFSET_NVFP4) return launch_all<Nvfp4, T>(a, s);
    }
    return STATUS_FORMAT;
}
// dtype: 0 bf16, 1 fp16 activations.
template <int GROUPS> int int4_linear(const GemvArgs& a, int dtype, void* stream) {
    if ((two_tables(a.offset_kind) || a.offset_kind == OFFSET_NVFP4) && !a.offset) return STATUS_POINTER;
    const auto s = static_cast<GpuStream>(stream);
    return by_dtype(dtype, [&](auto t) { return by_offset<GROUPS, decltype(t)>(a, s); });
}
