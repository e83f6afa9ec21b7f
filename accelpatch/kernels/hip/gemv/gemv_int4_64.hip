// gemv_int4_64: int4 weights in groups of 64.
#include "gemv_int4.h"

extern "C" int accelpatch_gemv_int4_64(const GemvArgs* a, int dtype, int group_size, void* stream) {
    return group_size == 64 ? int4_linear<2>(*a, dtype, stream) : int(STATUS_FORMAT);
}
