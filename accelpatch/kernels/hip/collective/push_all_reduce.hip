// Launches of the one-shot all-reduce.
#include "push_all_reduce.h"

namespace {
template <class T, int RANKS> __global__ void __launch_bounds__(VECTORS) push_all_reduce_kernel(PushArgs a) {
    push_and_add<T, RANKS>(a, int(blockIdx.x));
}

template <class T> int launch(const PushArgs& a, GpuStream stream) {
    auto* const kernel = a.world <= 2   ? push_all_reduce_kernel<T, 2>
                         : a.world <= 4 ? push_all_reduce_kernel<T, 4>
                                        : push_all_reduce_kernel<T, MOST_RANKS>;
    const int blocks = int((a.vectors + VECTORS - 1) / VECTORS);
    const int error = launch_kernel(kernel, blocks, VECTORS, 0, stream, device_limits(), true, a);
    return error ? STATUS_DEVICE + error : STATUS_OK;
}
}  // namespace

// dtype: 0 bf16, 1 fp16, 2 fp32.
extern "C" int accelpatch_push_all_reduce(const PushArgs* args, int dtype, void* stream) {
    const PushArgs& a = *args;
    if (a.world < 2 || a.world > MOST_RANKS || a.rank < 0 || a.rank >= a.world || a.patience < 0) return STATUS_SIZE;
    if (a.vectors < 1 || a.vectors > VECTORS * MOST_BLOCKS) return STATUS_SIZE;
    for (int r = 0; r < a.world; ++r)
        if (!a.memory[r] || !multiple_of_16(a.memory[r])) return STATUS_POINTER;
    if (!a.slot_numbers || !a.failed || !a.x || !a.y) return STATUS_POINTER;
    if (!multiple_of_16(a.x) || !multiple_of_16(a.y) || !multiple_of_16(a.residual)) return STATUS_POINTER;
    const auto where = static_cast<GpuStream>(stream);
    return dtype == 0   ? launch<Bf16>(a, where)
           : dtype == 1 ? launch<F16>(a, where)
           : dtype == 2 ? launch<F32>(a, where)
                        : STATUS_FORMAT;
}
