// gemv_fp8: e4m3 weights (fnuz = 1: the form of gfx942), one float scale a row. fnuz = 2: e4m3fn with a
// scale for each row and 128 values of K, [N][ceil(K / 128)]. dtype: 0 bf16, 1 fp16 activations.
#include "gemv_host.h"
#include "instances.h"

extern "C" int accelpatch_gemv_fp8(const GemvArgs* a, int dtype, int fnuz, void* stream) {
    const auto s = static_cast<GpuStream>(stream);
    return by_dtype(dtype, [&](auto t) {
        if constexpr (HAS<2>) {
            if (fnuz == 2) return launch_all<Fp8Blocks, decltype(t)>(*a, s);
        }
        return by_form(fnuz, [&](auto f) { return launch_all<Fp8<decltype(f)::value>, decltype(t)>(*a, s); });
    });
}
