// decode_attention_one: the launches of decode_attention for lone tokens whose heads each have a cached head. NVIDIA
// only.
#include "attention_launch.h"
#include "instances.h"

namespace {
template <class T, int WIDE>
int by_buffer(const AttentionArgs& a, const AttentionPlan& plan, const DeviceLimits& limits, bool deep, GpuStream s) {
    if constexpr (KINDS_HERE<WIDE> && HAS<WIDE>) {
        if (deep) return start_of_rows<T, WIDE, ATTENTION_DEEP, ONE>(a, plan, limits, s);
        if constexpr (WIDE > 64) return start_of_rows<T, WIDE, ATTENTION_SHALLOW, ONE>(a, plan, limits, s);
    }
    return STATUS_FORMAT;
}
}  // namespace

int start_of_one(const AttentionArgs& a, const AttentionPlan& plan, const DeviceLimits& limits, int dtype, bool deep,
    GpuStream stream) {
    return by_dtype(dtype, [&](auto t) {
        using T = decltype(t);
        return a.size == 64 ? by_buffer<T, 64>(a, plan, limits, deep, stream)
                            : by_buffer<T, 128>(a, plan, limits, deep, stream);
    });
}
