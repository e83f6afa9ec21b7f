// gemv_fp8: e4m3 weights (fnuz = 1: the form of gfx942), one float scale a row. dtype: 0 bf16, 1 fp16 activations.
#include "gemv_host.h"
#include "instances.h"

namespace {
template <class T> int by_form(const GemvArgs& a, int fnuz, GpuStream s) {
    if constexpr (HAS<0>) {
        if (fnuz == 0) return launch_all<Fp8<false>, T>(a, s);
    }
    if constexpr (HAS<1>) {
        if (fnuz == 1) return launch_all<Fp8<true>, T>(a, s);
    }
    return STATUS_FORMAT;
}
}  // namespace

extern "C" int accelpatch_gemv_fp8(const GemvArgs* a, int dtype, int fnuz, void* stream) {
    const auto s = static_cast<GpuStream>(stream);
    return by_dtype(dtype, [&](auto t) { return by_form<decltype(t)>(*a, fnuz, s); });
}
