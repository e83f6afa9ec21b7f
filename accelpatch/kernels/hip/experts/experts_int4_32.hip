// experts_int4_32: 4-bit weights of experts, groups of 32; also those of e2m1.
#include "experts.h"

extern "C" int accelpatch_experts_int4_32(
    const GemvArgs* a, const ExpertArgs* e, int dtype, int group_size, void* stream) {
    return group_size == 32 ? int4_experts<4>(*a, *e, dtype, stream) : int(STATUS_FORMAT);
}
