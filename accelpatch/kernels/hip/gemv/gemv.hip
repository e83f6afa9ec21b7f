// gemv: fp16 and bf16 weights. dtype: 0 bf16, 1 fp16 (activations and weights alike).
#include "gemv_host.h"
#include "instances.h"

extern "C" int accelpatch_gemv(const GemvArgs* a, int dtype, void* stream) {
    return by_dtype(dtype, [&](auto t) { return launch_all<Plain, decltype(t)>(*a, static_cast<GpuStream>(stream)); });
}
