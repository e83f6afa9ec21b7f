// gemv_int4: int4 weights in tiles, packed 16-bit scales and offsets for groups of 32, 64 or 128 times a power of two;
// a whole row is one group (group_shift 30). dtype: 0 bf16, 1 fp16 activations.
#include "gemv_int4.h"

extern "C" int accelpatch_gemv_int4(const GemvArgs* a, int dtype, int group_size, void* stream) {
    const auto s = static_cast<GpuStream>(stream);
    if (a->offset_kind != OFFSET_NONE && !a->offset) return STATUS_POINTER;
    if (group_size == 32) return gemv_int4_groups_of_32(*a, dtype, s);
    if (group_size == 64) return gemv_int4_groups_of_64(*a, dtype, s);
    if (group_size >= 128 && a->group_shift >= 0 && a->group_shift <= 30) return by_dtype<1>(*a, dtype, s);
    return STATUS_FORMAT;
}
