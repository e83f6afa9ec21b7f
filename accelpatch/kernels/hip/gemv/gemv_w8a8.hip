// gemv_w8a8: int8 weights, one float scale a row, and int8 activations with a scale a token, or the static one that
// `offset` points to. dtype: 0 bf16, 1 fp16 activations.
#include "gemv_host.h"
#include "instances.h"

extern "C" int accelpatch_gemv_w8a8(const GemvArgs* a, int dtype, void* stream) {
    if (a->m && !a->scale) return STATUS_POINTER;
    const auto s = static_cast<GpuStream>(stream);
    return by_dtype(dtype, [&](auto t) { return launch_all<W8A8, decltype(t)>(*a, s); });
}
