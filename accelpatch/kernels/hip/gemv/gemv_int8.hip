// gemv_int8: int8 weights, one float scale a row (group_size 0), or packed 16-bit scales for groups of 32 or of 64
// times a power of two. dtype: 0 bf16, 1 fp16 activations.
#include "gemv_host.h"
#include "instances.h"

namespace {
template <class T> int by_group(const GemvArgs& a, int group_size, GpuStream s) {
    if constexpr (HAS<0>) {
        if (group_size == 0) return launch_all<Int8<0>, T>(a, s);
    }
    if constexpr (HAS<32>) {
        if (group_size == 32) return launch_all<Int8<2>, T>(a, s);
    }
    if constexpr (HAS<64>) {
        if (group_size >= 64 && a.group_shift >= 0 && int64_t(64) << a.group_shift == group_size)
            return launch_all<Int8<1>, T>(a, s);
    }
    return STATUS_FORMAT;
}
}  // namespace

extern "C" int accelpatch_gemv_int8(const GemvArgs* a, int dtype, int group_size, void* stream) {
    const auto s = static_cast<GpuStream>(stream);
    return by_dtype(dtype, [&](auto t) { return by_group<decltype(t)>(*a, group_size, s); });
}
