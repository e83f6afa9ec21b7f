// Host side: limits, the plan of shared memory, the launch. Every limit is checked here, in 64-bit arithmetic.
#pragma once
#include "gemv_kernel.h"

enum Status : int { STATUS_OK = 0, STATUS_SIZE = 1, STATUS_POINTER = 2, STATUS_MEMORY = 3, STATUS_FORMAT = 4, STATUS_DEVICE = 1000 };

struct DeviceLimits {
    int processors, shared_block, shared_processor, dependent_launch;
};

#if ACCELPATCH_AMD
inline int attribute(hipDeviceAttribute_t what, int device) { int v = 0; (void)hipDeviceGetAttribute(&v, what, device); return v; }
inline DeviceLimits device_limits() {
    int device = 0;
    (void)hipGetDevice(&device);
    const int shared = attribute(hipDeviceAttributeMaxSharedMemoryPerBlock, device);
    return {attribute(hipDeviceAttributeMultiprocessorCount, device), shared, shared, 0};
}
#else
inline int attribute(cudaDeviceAttr what, int device) { int v = 0; (void)cudaDeviceGetAttribute(&v, what, device); return v; }
inline DeviceLimits device_limits() {
    int device = 0;
    (void)cudaGetDevice(&device);
    return {attribute(cudaDevAttrMultiProcessorCount, device), attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
            attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device),
            attribute(cudaDevAttrComputeCapabilityMajor, device) >= 9};
}
#endif

constexpr int64_t LARGEST = int64_t(1) << 31;
constexpr int PHASE_VALUES = ACCELPATCH_AMD ? 2048 : 4096;  // K staged at once: 8 tokens within half a processor

inline int check(const GemvArgs& a) {
    if (a.m < 0 || a.m > 8 || a.n < 1 || a.k < 1 || a.n >= LARGEST || a.k >= LARGEST / 16) return STATUS_SIZE;
    if (a.activation == ACT_SILU_GATE && a.n % 2) return STATUS_SIZE;
    if (a.m && (!a.w || !a.x || !a.y)) return STATUS_POINTER;
    return STATUS_OK;
}

inline bool multiple_of_16(const void* pointer, int64_t stride_bytes = 0) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && stride_bytes % 16 == 0;
}

inline int64_t round_up(int64_t v, int64_t to) { return (v + to - 1) / to * to; }

constexpr int BLOCKS_A_PROCESSOR = ACCELPATCH_AMD ? 2 : 1;
// Whether four or eight waves share a tile: whichever has the busiest wave take fewer turns, a tile's end counted as one.
inline int waves_shift(const GemvPlan& p, int steps_a_turn, int blocks) {
    int64_t turns[2];
    for (const int shift : {2, 3}) {
        const int64_t tiles = (p.tiles + blocks - 1) / blocks, at_once = WAVES >> shift, each = (p.steps + steps_a_turn - 1) / steps_a_turn;
        turns[shift - 2] = (tiles + at_once - 1) / at_once * (((each + (1 << shift) - 1) >> shift) + 1);
    }
    return turns[1] < turns[0] ? 3 : 2;
}

// Lays out shared memory for one launch of up to 8 tokens; false where even the smallest ring does not fit.
template <class F, class T> bool make_plan(GemvPlan& p, const GemvArgs& a, const DeviceLimits& limits) {
    constexpr int turn = STEPS_A_TURN<F>, slot = turn * SLOT_BYTES<F>;
    const int64_t rows = a.activation == ACT_SILU_GATE ? a.n / 2 : a.n, each = a.activation == ACT_SILU_GATE ? 8 : 16;
    p.tiles = int32_t((rows + each - 1) / each);
    p.steps = int32_t((a.k + F::KSTEP - 1) / F::KSTEP);
    p.phases = int32_t((a.k + PHASE_VALUES - 1) / PHASE_VALUES);
    p.phase_steps = int32_t(round_up((p.steps + p.phases - 1) / p.phases, 256 / F::KSTEP));
    p.phases = (p.steps + p.phase_steps - 1) / p.phase_steps;
    const int64_t row_bytes = a.k * F::VALUE_BITS / 8;
    p.waves_shift = waves_shift(p, turn, limits.processors * BLOCKS_A_PROCESSOR);
    p.w_aligned = F::TILED || multiple_of_16(a.w, row_bytes);
    p.full_steps = F::TILED ? p.steps : p.w_aligned ? int32_t(a.k / F::KSTEP) : 0;
    p.x_aligned = multiple_of_16(a.x, a.x_stride * 2) && a.k % 8 == 0 && multiple_of_16(a.norm_weight) && multiple_of_16(a.norm_bias);
    const int64_t moments = round_up(Stager<F, T, THREADS>::FLOATS * 4, 128), partial = round_up(a.m * WAVES * PARTIAL_STRIDE * 4, 128);
    const int64_t half = limits.shared_processor / 2 - (ACCELPATCH_AMD ? 0 : 1024), whole = limits.shared_block;
    const int want = a.depth > 0 ? a.depth : 4;
    const int choices[] = {4, 2};
    for (const int64_t room : {half, whole}) {
        for (const bool all : {true, false}) {
            if (!all && (p.phases == 1 || a.norm)) continue;
            p.resident = all ? p.phases : 1;
            const int64_t steps = round_up(all ? p.steps : p.phase_steps, 2);
            p.token_stride = int32_t(steps * F::KSTEP * 2 + F::TOKEN_PAD);
            const int64_t sums = F::SUMS ? steps * F::GROUPS * 32 : 0;
            const int64_t fixed = round_up(p.token_stride * a.m, 128) + round_up(sums, 128) + moments;
            p.sums_at = int32_t(round_up(p.token_stride * a.m, 128));
            p.moments_at = int32_t(p.sums_at + round_up(sums, 128));
            p.partial_at = int32_t(p.moments_at + moments);
            for (const int depth : choices) {
                p.partial_buffers = depth > 2 ? 2 : 1;  // where memory is short, a second barrier instead
                const int64_t partials = p.partial_buffers * partial;
                const int64_t bytes = fixed + partials + (ACCELPATCH_AMD ? 0 : int64_t(depth) * slot * WAVES);
                if ((depth > want && !ACCELPATCH_AMD) || bytes > room) continue;
                p.ring_at = int32_t(p.partial_at + partials);
                p.depth = depth, p.bytes = int32_t(bytes);
                return true;
            }
        }
    }
    return false;
}

template <class F, class T> int launch(const GemvArgs& a, GpuStream stream) {
    const DeviceLimits limits = device_limits();
    GemvPlan plan = {};
    if (!make_plan<F, T>(plan, a, limits)) return STATUS_MEMORY;
    // One block a processor, also where there are fewer tiles: the next kernel's blocks then find one place on each.
    const int blocks = a.blocks > 0 ? a.blocks : limits.processors * BLOCKS_A_PROCESSOR;
    const auto kernel = gemv_kernel<F, T>;
#if ACCELPATCH_AMD
    (void)hipGetLastError();
    kernel<<<dim3(blocks), dim3(THREADS), plan.bytes, stream>>>(a, plan);
    const int error = hipGetLastError();
#else
    int error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limits.shared_block);
    if (!error) error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    if (error) return STATUS_DEVICE + error;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks), config.blockDim = dim3(THREADS), config.dynamicSmemBytes = plan.bytes, config.stream = stream;
    config.attrs = &attribute, config.numAttrs = limits.dependent_launch && a.dependent >= 0 ? 1 : 0;
    error = cudaLaunchKernelEx(&config, kernel, a, plan);
#endif
    return error ? STATUS_DEVICE + error : STATUS_OK;
}

// More than 8 tokens: the same launch for each 8 of them.
template <class F, class T> int launch_all(const GemvArgs& args, GpuStream stream) {
    GemvArgs a = args;
    a.m = args.m < 8 ? args.m : 8;
    if (const int bad = check(a)) return bad;
    int64_t most = 8;  // fewer where a norm over a very long K leaves no room: a row's bits stay the same
    for (int64_t done = 0; done < args.m; done += a.m) {
        a.m = args.m - done < most ? args.m - done : most;
        a.x = static_cast<const uint16_t*>(args.x) + done * args.x_stride;
        a.y = static_cast<uint16_t*>(args.y) + done * args.y_stride;
        if (args.residual) a.residual = static_cast<const uint16_t*>(args.residual) + done * args.residual_stride;
        const int bad = launch<F, T>(a, stream);
        if (bad == STATUS_MEMORY && most > 1) most /= 2, a.m = 0;
        else if (bad) return bad;
    }
    return STATUS_OK;
}
