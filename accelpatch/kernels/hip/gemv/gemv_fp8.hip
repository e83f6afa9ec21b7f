// gemv_fp8: e4m3 weights (fnuz = 1: the form of gfx942), one float scale a row. dtype: 0 bf16, 1 fp16 activations.
#include "gemv_host.h"
#include "instances.h"

extern "C" int accelpatch_gemv_fp8(const GemvArgs* a, int dtype, int fnuz, void* stream) {
    const auto s = static_cast<GpuStream>(stream);
    return by_dtype(dtype, [&](auto t) {
        return by_form(fnuz, [&](auto f) { return launch_all<Fp8<decltype(f)::value>, decltype(t)>(*a, s); });
    });
}
