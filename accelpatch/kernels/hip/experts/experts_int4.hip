// experts_int4: int4 weights of experts, groups of 128 times a power of two; a whole row is one group (group_shift 30).
#include "experts.h"

extern "C" int accelpatch_experts_int4(
    const GemvArgs* a, const ExpertArgs* e, int dtype, int group_size, void* stream) {
    if (group_size < 128) return STATUS_FORMAT;
    return int4_experts<1>(*a, *e, dtype, stream);
}
