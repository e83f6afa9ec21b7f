// gemv_int4_32: 4-bit weights in groups of 32, and of nvfp4 in pairs of groups of 16.
#include "gemv_int4.h"

extern "C" int accelpatch_gemv_int4_32(const GemvArgs* a, int dtype, int group_size, void* stream) {
    return group_size == 32 ? int4_linear<4>(*a, dtype, stream) : int(STATUS_FORMAT);
}
