// decode_attention_one: the launches of decode_attention for lone tokens whose heads each have a cached head. NVIDIA
// only.
#include "attention_launch.h"
#include "instances.h"

int start_of_one(const AttentionArgs& a, const AttentionPlan& plan, const DeviceLimits& limits, int dtype, bool deep,
    GpuStream stream) {
    return by_dtype(dtype, [&](auto t) {
        using T = decltype(t);
        return a.size == 64 ? one_by_buffer<T, 64>(a, plan, limits, deep, stream)
                            : one_by_buffer<T, 128>(a, plan, limits, deep, stream);
    });
}
