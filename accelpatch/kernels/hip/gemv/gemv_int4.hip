// gemv_int4: int4 weights, groups of 128 times a power of two; a whole row is one group (group_shift 30).
#include "gemv_int4.h"

extern "C" int accelpatch_gemv_int4(const GemvArgs* a, int dtype, int group_size, void* stream) {
    if (group_size < 128 || a->group_shift < 0 || a->group_shift > 30) return STATUS_FORMAT;
    return int4_linear<1>(*a, dtype, stream);
}
