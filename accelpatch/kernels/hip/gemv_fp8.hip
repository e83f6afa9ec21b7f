// gemv_fp8: e4m3 weights (fnuz = 1: the form of gfx942), one float scale a row. dtype: 0 bf16, 1 fp16 activations.
#include "gemv_host.h"

namespace {
template <class T> int by_form(const GemvArgs& a, int fnuz, GpuStream s) {
    return fnuz ? launch_all<Fp8<true>, T>(a, s) : launch_all<Fp8<false>, T>(a, s);
}
}  // namespace

extern "C" int accelpatch_gemv_fp8(const GemvArgs* a, int dtype, int fnuz, void* stream) {
    const auto s = static_cast<GpuStream>(stream);
    return dtype ? by_form<F16>(*a, fnuz, s) : by_form<Bf16>(*a, fnuz, s);
}
