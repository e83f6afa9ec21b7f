// gemv_int4: int4 weights in tiles, packed 16-bit scales and offsets for groups of 32, 64 or 128 times a power of two; a
// whole row is one group (group_shift 30). dtype: 0 bf16, 1 fp16 activations.
#include "gemv_host.h"

namespace {
template <int GROUPS, class T> int by_offset(const GemvArgs& a, GpuStream s) {
    if (a.offset_kind == OFFSET_NONE) return launch_all<Int4<GROUPS, OFFSET_NONE>, T>(a, s);
    if (a.offset_kind == OFFSET_ZERO_POINT) return launch_all<Int4<GROUPS, OFFSET_ZERO_POINT>, T>(a, s);
    return launch_all<Int4<GROUPS, OFFSET_MINIMUM>, T>(a, s);
}
template <class T> int by_group(const GemvArgs& a, int group_size, GpuStream s) {
    if (a.offset_kind != OFFSET_NONE && !a.offset) return STATUS_POINTER;
    if (group_size == 32) return by_offset<4, T>(a, s);
    if (group_size == 64) return by_offset<2, T>(a, s);
    if (group_size >= 128 && a.group_shift >= 0 && a.group_shift <= 30) return by_offset<1, T>(a, s);
    return STATUS_FORMAT;
}
}  // namespace

extern "C" int accelpatch_gemv_int4(const GemvArgs* a, int dtype, int group_size, void* stream) {
    const auto s = static_cast<GpuStream>(stream);
    return dtype ? by_group<F16>(*a, group_size, s) : by_group<Bf16>(*a, group_size, s);
}
