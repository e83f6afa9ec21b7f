// gemv_int3: int3 weights in tiles, packed 16-bit scales and offsets, in groups of 32, 64, or 128 times a power of two;
// a whole row is one group (group_shift 30). dtype: 0 bf16, 1 fp16 activations. An instance has the number 10 * scales
// of a step + kind of offset.
#include "gemv_host.h"
#include "instances.h"

namespace {
template <int GROUPS, class T> int by_offset(const GemvArgs& a, GpuStream s) {
    if constexpr (HAS<10 * GROUPS + OFFSET_NONE>) {
        if (a.offset_kind == OFFSET_NONE) return launch_all<Int3<GROUPS, OFFSET_NONE>, T>(a, s);
    }
    if constexpr (HAS<10 * GROUPS + OFFSET_ZERO_POINT>) {
        if (a.offset_kind == OFFSET_ZERO_POINT) return launch_all<Int3<GROUPS, OFFSET_ZERO_POINT>, T>(a, s);
    }
    if constexpr (HAS<10 * GROUPS + OFFSET_MINIMUM>) {
        if (a.offset_kind == OFFSET_MINIMUM) return launch_all<Int3<GROUPS, OFFSET_MINIMUM>, T>(a, s);
    }
    return STATUS_FORMAT;
}

template <class T> int by_group(const GemvArgs& a, int group_size, GpuStream s) {
    if (group_size == 32) return by_offset<4, T>(a, s);
    if (group_size == 64) return by_offset<2, T>(a, s);
    if (group_size < 128 || a.group_shift < 0 || a.group_shift > 30) return STATUS_FORMAT;
    return by_offset<1, T>(a, s);
}
}  // namespace

extern "C" int accelpatch_gemv_int3(const GemvArgs* a, int dtype, int group_size, void* stream) {
    if (two_tables(a->offset_kind) && !a->offset) return STATUS_POINTER;
    const auto s = static_cast<GpuStream>(stream);
    return by_dtype(dtype, [&](auto t) { return by_group<decltype(t)>(*a, group_size, s); });
}
