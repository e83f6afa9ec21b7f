// experts_int4_64: int4 weights of experts, groups of 64.
#include "experts.h"

extern "C" int accelpatch_experts_int4_64(
    const GemvArgs* a, const ExpertArgs* e, int dtype, int group_size, void* stream) {
    return group_size == 64 ? int4_experts<2>(*a, *e, dtype, stream) : int(STATUS_FORMAT);
}
