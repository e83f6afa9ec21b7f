// gemv: fp16 and bf16 weights. dtype: 0 bf16, 1 fp16 (activations and weights alike).
#include "gemv_host.h"

extern "C" int accelpatch_gemv(const GemvArgs* a, int dtype, void* stream) {
    const auto s = static_cast<GpuStream>(stream);
    return dtype ? launch_all<Plain, F16>(*a, s) : launch_all<Plain, Bf16>(*a, s);
}
