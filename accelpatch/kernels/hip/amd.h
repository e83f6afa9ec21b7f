// AMD, gfx90a, gfx942 and gfx950: waves of 64, 16x16 matrix products, weights one turn ahead in registers.
#pragma once

using GpuStream = hipStream_t;
constexpr int WAVE = 64;
constexpr int BLOCKS_RESIDENT = 1;
constexpr int BLOCKS_LAUNCHED = 1;
constexpr int PHASE_VALUES = 2048;   // of K staged at once where not all fits
constexpr bool SHARED_RING = false;
constexpr int DEEP = 1, SHALLOW = 1, DEEP_FLOATS = 1;
constexpr int NARROW_TOKENS = 0;
constexpr int WIDE_TOKENS = 8;
constexpr int RESERVED_SHARED = 0;
#if defined(__gfx90a__)
constexpr bool FLUSHING_HALF = true;  // fp16 matrix products lose subnormals
#else
constexpr bool FLUSHING_HALF = false;
#endif

using Half2 = _Float16 __attribute__((ext_vector_type(2)));
using Half4 = _Float16 __attribute__((ext_vector_type(4)));
using Short4 = short __attribute__((ext_vector_type(4)));
using Float4 = float __attribute__((ext_vector_type(4)));
using Int4Vector = int __attribute__((ext_vector_type(4)));

DEVICE int lane_id() { return threadIdx.x % WAVE; }
template <class V> DEVICE V lane_xor(V value, int mask) { return __shfl_xor(value, mask, WAVE); }
DEVICE float from_lane(float value, int lane) { return __shfl(value, lane, WAVE); }
DEVICE uint32_t lane_vote(bool yes) { return static_cast<uint32_t>(__ballot(yes)); }

// ---- conversions and bits ----
DEVICE uint32_t float_to_bf16(float value) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (bits >> 16) | 0x40u;
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}
DEVICE uint32_t floats_to_bf16(float low, float high) { return float_to_bf16(low) | float_to_bf16(high) << 16; }
DEVICE float half_to_float(uint32_t bits) { return static_cast<float>(__builtin_bit_cast(_Float16, static_cast<uint16_t>(bits))); }
DEVICE uint32_t float_to_half(float value) { return __builtin_bit_cast(uint16_t, static_cast<_Float16>(value)); }
DEVICE uint32_t floats_to_half(float low, float high) { return float_to_half(low) | float_to_half(high) << 16; }
DEVICE float fast_exp2(float v) { return __builtin_amdgcn_exp2f(v); }
DEVICE float fast_reciprocal(float v) { return __builtin_amdgcn_rcpf(v); }  // within a unit in the last place
DEVICE uint32_t pair_fma(uint32_t a, uint32_t b, uint32_t c) {  // of fp16
    return __builtin_bit_cast(uint32_t, __builtin_elementwise_fma(__builtin_bit_cast(Half2, a), __builtin_bit_cast(Half2, b), __builtin_bit_cast(Half2, c)));
}
DEVICE uint32_t pair_max(uint32_t a, uint32_t b) {  // of two halves each, unsigned
    using Pair = uint16_t __attribute__((ext_vector_type(2)));
    return __builtin_bit_cast(uint32_t, __builtin_elementwise_max(__builtin_bit_cast(Pair, a), __builtin_bit_cast(Pair, b)));
}
// Four bytes of a (0 to 3) and b (4 to 7), one in each nibble of SELECT, the lowest first.
template <uint32_t SELECT> DEVICE uint32_t permute(uint32_t a, uint32_t b) {
    return __builtin_amdgcn_perm(b, a, (SELECT & 15u) | (SELECT >> 4 & 15u) << 8 | (SELECT >> 8 & 15u) << 16 | (SELECT >> 12 & 15u) << 24);
}

// ---- memory ----
DEVICE Words4 load_activation16(const void* source) { return *static_cast<const Words4*>(source); }
DEVICE uint32_t load_activation2(const void* source) { return *static_cast<const uint16_t*>(source); }
DEVICE uint32_t load_activation4(const void* source) { return *static_cast<const uint32_t*>(source); }
// BYTES past the caches; zeros, and nothing read, where not `there`. The address space is said outright, or a pointer
// that loops back makes it a flat load.
template <int BYTES> DEVICE void stream_copy(void* into, const void* source, bool there) {
    using Vector = uint32_t __attribute__((ext_vector_type(BYTES / 4)));
    Vector v = 0;
    if (there) v = __builtin_nontemporal_load((const __attribute__((address_space(1))) Vector*)source);
    for (int i = 0; i < BYTES / 4; ++i) static_cast<uint32_t*>(into)[i] = v[i];
}
DEVICE void copy_activation16(void* into, const void* source, bool there) {
    *static_cast<Words4*>(into) = there ? load_activation16(source) : Words4{0, 0, 0, 0};
}
DEVICE void copies_done(int) {}
DEVICE void ring_commit() {}
template <int> DEVICE void ring_wait() {}

template <int> DEVICE void prefetch_l2(const void*) {}  // kernels do not overlap, so there is no time for it

// ---- order: no dependent launch, and one barrier for the workgroup, which arriving waits for too ----
DEVICE void grid_release() {}
DEVICE void grid_wait() {}
DEVICE void linger() {}
DEVICE void wave_sync() {}  // a lane reads no other's shared memory without a barrier
DEVICE void group_sync(int, int) { __syncthreads(); }
DEVICE void group_arrive(int, int) { __syncthreads(); }

DEVICE int count_up(int32_t* counter, int by) {
    __threadfence();
    const int before = atomicAdd(counter, by);
    __threadfence();
    return before;
}

// ---- no clusters ----
constexpr int CLUSTER = 1;
template <class F> constexpr int CLUSTER_DEPTH = 1;
using Mailbox = uint64_t;
#include "no_cluster.h"

// ---- matrix products: as in nvidia.h ----
constexpr int ROWS_PER_LANE = 1;
DEVICE int fragment_row(int) { return lane_id() & 15; }
DEVICE int fragment_quarter() { return lane_id() >> 4; }
constexpr int SCALE_PAIRS = 4;
DEVICE int scale_pair() { return 4 * ((lane_id() >> 4) & 1); }

template <bool> struct Cells {
    static constexpr int COUNT = 4, TOKENS = 1;
    static DEVICE int row(int i) { return 4 * (lane_id() >> 4) + i; }
    static DEVICE int token(int) { return lane_id() & 7; }
    static DEVICE bool owns(int) { return (lane_id() & 15) < 8; }
    static DEVICE int pair(int i) { return i; }
    static DEVICE int half(int) { return lane_id() >> 5; }
};

template <class T> struct MatrixProduct : Cells<false> {
    float sum[4];
    DEVICE void zero() { for (float& v : sum) v = 0.f; }
    DEVICE void finish() {}
    static DEVICE int column(int tokens) { return min(lane_id() & 7, tokens - 1); }
    DEVICE void add(const Words4* a, const char* chunk, int, int) {
        const Words4 b = *reinterpret_cast<const Words4*>(chunk);
        multiply(a[0].x, a[0].y, b.x, b.y);
        multiply(a[0].z, a[0].w, b.z, b.w);
    }
    DEVICE void multiply(uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1) {
        const uint64_t a = a0 | (uint64_t(a1) << 32), b = b0 | (uint64_t(b1) << 32);
        Float4 c = {sum[0], sum[1], sum[2], sum[3]};
        if constexpr (T::BF16) c = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(__builtin_bit_cast(Short4, a), __builtin_bit_cast(Short4, b), c, 0, 0, 0);
        else c = __builtin_amdgcn_mfma_f32_16x16x16f16(__builtin_bit_cast(Half4, a), __builtin_bit_cast(Half4, b), c, 0, 0, 0);
        for (int i = 0; i < 4; ++i) sum[i] = c[i];
    }
};

// Mixed multiply-add instead of the matrix unit, which flushes subnormals of fp16 on gfx90a. A lane holds a quarter of a
// row's products with each token; finish() adds the quarters.
struct MixedProduct {
    static constexpr int COUNT = 8, TOKENS = 8;
    float sum[8];
    static DEVICE int row(int) { return lane_id() & 15; }
    static DEVICE int token(int i) { return i; }
    static DEVICE bool owns(int) { return lane_id() < 16; }
    DEVICE void zero() { for (float& v : sum) v = 0.f; }
    DEVICE void finish() {
        for (float& v : sum) v += lane_xor(v, 16), v += lane_xor(v, 32);
    }
    static DEVICE int column(int) { return 0; }
    DEVICE void add(const Words4* a, const char* chunk, int stride, int tokens) {
        const uint32_t w[4] = {a[0].x, a[0].y, a[0].z, a[0].w};
#pragma unroll
        for (int token = 0; token < 8; ++token) {
            if (token >= tokens) continue;
            const Words4 b = *reinterpret_cast<const Words4*>(chunk + token * stride);
            const uint32_t x[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const Half2 p = __builtin_bit_cast(Half2, w[i]), q = __builtin_bit_cast(Half2, x[i]);
                sum[token] = __builtin_fmaf(float(p[0]), float(q[0]), sum[token]);
                sum[token] = __builtin_fmaf(float(p[1]), float(q[1]), sum[token]);
            }
        }
    }
};
template <class T, bool MIXED> struct FloatProductOf { using Type = MatrixProduct<T>; };
template <class T> struct FloatProductOf<T, true> { using Type = MixedProduct; };
template <class T> using FloatProduct = typename FloatProductOf<T, FLUSHING_HALF && !T::BF16>::Type;

template <bool> struct IntegerProduct : Cells<false> {
    int high[4], low[4];
    struct Activations { Words4 high, low; };
    DEVICE void zero() { for (int i = 0; i < 4; ++i) high[i] = low[i] = 0; }
    DEVICE void plus(const IntegerProduct& other) { for (int i = 0; i < 4; ++i) high[i] += other.high[i], low[i] += other.low[i]; }
    static DEVICE int place(int tokens, int token_stride) { return min(lane_id() & 7, tokens - 1) * token_stride + fragment_quarter() * 32; }
    static DEVICE Activations load(const char* x) { return {*reinterpret_cast<const Words4*>(x), *reinterpret_cast<const Words4*>(x + 16)}; }
    DEVICE void add(const Words4* a, const Activations& x, int part) {
        const uint32_t a0 = part ? a[0].z : a[0].x, a1 = part ? a[0].w : a[0].y;
        multiply(high, a0, a1, part ? x.high.z : x.high.x, part ? x.high.w : x.high.y);
        multiply(low, a0, a1, part ? x.low.z : x.low.x, part ? x.low.w : x.low.y);
    }
    DEVICE float value(int i) const { return float(high[i] * 256 + low[i]); }
    static DEVICE void multiply(int* sum, uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1) {
        Int4Vector c = {sum[0], sum[1], sum[2], sum[3]};
#if defined(__gfx90a__)
        c = __builtin_amdgcn_mfma_i32_16x16x16i8(int(a0), int(b0), c, 0, 0, 0);
        c = __builtin_amdgcn_mfma_i32_16x16x16i8(int(a1), int(b1), c, 0, 0, 0);
#else
        c = __builtin_amdgcn_mfma_i32_16x16x32_i8(long(a0 | uint64_t(a1) << 32), long(b0 | uint64_t(b1) << 32), c, 0, 0, 0);
#endif
        for (int i = 0; i < 4; ++i) sum[i] = c[i];
    }
};

#include "amd_attention.h"

// ---- host ----
struct DeviceLimits {
    int processors, shared_block, shared_processor;
    bool dependent_launch;
    bool clusters;
};
inline int attribute(hipDeviceAttribute_t what, int device) {
    int v = 0;
    (void)hipDeviceGetAttribute(&v, what, device);
    return v;
}
inline DeviceLimits device_limits() {
    int device = 0;
    (void)hipGetDevice(&device);
    const int shared = attribute(hipDeviceAttributeMaxSharedMemoryPerBlock, device);
    return {attribute(hipDeviceAttributeMultiprocessorCount, device), shared, shared, false, false};
}
// The runtime's error, 0 for none.
template <class... ARGS>
int launch_kernel(void (*kernel)(ARGS...), int blocks, int threads, int shared, GpuStream stream, const DeviceLimits&, bool, ARGS... args) {
    (void)hipGetLastError();
    kernel<<<dim3(blocks), dim3(threads), shared, stream>>>(args...);
    return hipGetLastError();
}
