// gemv_w8a8_fp8: as gemv_w8a8, of 8-bit floats: e4m3 weights (fnuz = 1: the form of gfx942), one float scale a row, and
// e4m3 activations with a scale a token, or the static one that `offset` points to. dtype: 0 bf16, 1 fp16 activations.
//
// Products are exact, and their sums float32: gfx942 and gfx950 multiply their own form by its matrix instruction, all
// else goes through fp16's (nvidia_mma.h says why).
#include "gemv_host.h"
#include "instances.h"

extern "C" int accelpatch_gemv_w8a8_fp8(const GemvArgs* a, int dtype, int fnuz, void* stream) {
    if (a->m && !a->scale) return STATUS_POINTER;
    const auto s = static_cast<GpuStream>(stream);
    return by_dtype(dtype, [&](auto t) {
        return by_form(fnuz, [&](auto f) { return launch_all<W8A8Fp8<decltype(f)::value>, decltype(t)>(*a, s); });
    });
}
