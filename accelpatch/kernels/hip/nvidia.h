// NVIDIA, sm_80 and later: waves of 32, m16n8 matrix products, a ring in shared memory, dependent launch (Hopper on).
#pragma once
#include <atomic>

using GpuStream = cudaStream_t;
constexpr int WAVE = 32;
constexpr int BLOCKS_RESIDENT = 2;   // of a kernel on a processor: this one and its successor
constexpr int BLOCKS_LAUNCHED = 1;   // on each processor, also where there are fewer tiles: the successor's then find one place on each
constexpr int PHASE_VALUES = 4096;   // of K staged at once where not all fits: 8 tokens within half a processor
constexpr bool SHARED_RING = true;    // or else one turn ahead, in registers
constexpr int DEEP = 4, SHALLOW = 2;  // turns of a ring
constexpr int DEEP_FLOATS = 5;        // of 16-bit weights, whose turns are soon done
constexpr int NARROW_TOKENS = 2;     // up to how many tokens integer products have a form of their own: a wave finishes 16 rows of two
constexpr int WIDE_TOKENS = 3;       // up to how many tokens float products run without clusters
constexpr int RESERVED_SHARED = 1024;  // bytes of a block that are the system's
constexpr bool FLUSHING_HALF = false;  // whether fp16 matrix products lose subnormals

DEVICE int lane_id() { return threadIdx.x & 31; }
template <class V> DEVICE V lane_xor(V value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
DEVICE float from_lane(float value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
DEVICE uint32_t lane_vote(bool yes) { return __ballot_sync(0xffffffffu, yes); }  // of the first 32 lanes

// ---- conversions and bits ----
DEVICE uint32_t float_to_bf16(float value) {
    uint16_t bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
DEVICE uint32_t floats_to_bf16(float low, float high) {
    uint32_t bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
DEVICE float half_to_float(uint32_t bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<uint16_t>(bits)));
    return value;
}
DEVICE uint32_t float_to_half(float value) {
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
DEVICE uint32_t floats_to_half(float low, float high) {
    uint32_t bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
DEVICE float fast_exp2(float v) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(v));
    return y;
}
DEVICE float fast_reciprocal(float v) {  // within a unit in the last place
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(v));
    return y;
}
DEVICE uint32_t pair_fma(uint32_t a, uint32_t b, uint32_t c) {  // of fp16
    uint32_t d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
DEVICE uint32_t pair_max(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }  // of two halves each, unsigned
// Four bytes of a (0 to 3) and b (4 to 7), one in each nibble of SELECT, the lowest first.
template <uint32_t SELECT> DEVICE uint32_t permute(uint32_t a, uint32_t b) { return __byte_perm(a, b, SELECT); }

// ---- memory ----
DEVICE uint32_t shared_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }
// What another kernel may just have written: through L2, never a stale L1 line.
DEVICE Words4 load_activation16(const void* source) {
    Words4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(source) : "memory");
    return v;
}
DEVICE uint32_t load_activation2(const void* source) {
    uint16_t v;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(source) : "memory");
    return v;
}
DEVICE uint32_t load_activation4(const void* source) {
    uint32_t v;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(source) : "memory");
    return v;
}
// BYTES into the ring, asynchronously; zeros, and nothing read, where not `there`.
template <int BYTES> DEVICE void stream_copy(void* into, const void* source, bool there) {
    const int bytes = there ? BYTES : 0;
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(into)), "l"(source), "r"(bytes) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(into)), "l"(source), "n"(BYTES), "r"(bytes) : "memory");
    }
}
// 16 bytes of activations into shared memory, asynchronously and through L2; zeros, and nothing read, where not `there`.
DEVICE void copy_activation16(void* into, const void* source, bool there) { stream_copy<16>(into, source, there); }
DEVICE void ring_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for the oldest of DEPTH turns.
template <int DEPTH> DEVICE void ring_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 1) : "memory"); }
// Waits for all copies but those of so many turns (up to two) asked for last.
DEVICE void copies_done(int but) { but == 2 ? ring_wait<3>() : but == 1 ? ring_wait<2>() : ring_wait<1>(); }

template <int BYTES> DEVICE void prefetch_l2(const void* source) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "n"(BYTES) : "memory");
#endif
}

// ---- order ----
DEVICE void grid_release() {  // the next kernel may start
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
DEVICE void grid_wait() {  // for the kernel before to end
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// A barrier of `threads` threads that share `name` (0 to 7); those that only arrive go on at once.
DEVICE void group_sync(int name, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(name + 1), "r"(threads) : "memory"); }
DEVICE void wave_sync() { __syncwarp(); }
DEVICE void linger() {  // a microsecond
#if __CUDA_ARCH__ >= 700
    __nanosleep(1000);
#endif
}
DEVICE void group_arrive(int name, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(name + 1), "r"(threads) : "memory"); }

// Adds after all that the block wrote before a barrier and before all that it reads behind one; what was there.
DEVICE int count_up(int32_t* counter, int by) {
    int before;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(by) : "memory");
    return before;
}

#include "nvidia_cluster.h"

// ---- matrix products: a lane holds 16 bytes of each of ROWS_PER_LANE rows of a tile of 16; K is permuted alike in both
// operands, so the instruction's own order of K never matters ----
constexpr int ROWS_PER_LANE = 2;
DEVICE int fragment_row(int i) { return (lane_id() >> 2) + 8 * i; }
DEVICE int fragment_quarter() { return lane_id() & 3; }  // which 16 bytes of a row's 64
// Rows r and r + 8 share a word of scales: where a lane's words begin, and how many row pairs follow each other.
constexpr int SCALE_PAIRS = 1;
DEVICE int scale_pair() { return lane_id() >> 2; }

// Which row and token each of a lane's sums belongs to. NARROW: up to 4 tokens, else 8.
template <bool NARROW> struct Cells {
    static constexpr int COUNT = NARROW ? 2 : 4, TOKENS = NARROW ? 1 : 2;  // TOKENS: different ones, neighbours
    static DEVICE int row(int i) { return (lane_id() >> 2) + 8 * (NARROW ? i : i >> 1); }
    static DEVICE int token(int i) { return NARROW ? lane_id() & 3 : 2 * (lane_id() & 3) + (i & 1); }
    static DEVICE bool owns(int) { return true; }
    static DEVICE int pair(int) { return 0; }
    static DEVICE int half(int i) { return NARROW ? i : i >> 1; }  // of the word of scales
};

// 16-bit floats: 8 tokens.
template <class T> struct FloatProduct : Cells<false> {
    float sum[4], other[4];  // two chains: one alone would wait for its own latency
    DEVICE void zero() { for (int i = 0; i < 4; ++i) sum[i] = other[i] = 0.f; }
    DEVICE void finish() { for (int i = 0; i < 4; ++i) sum[i] += other[i]; }
    // The token whose activations this lane reads; columns past the last token repeat it and are never stored.
    static DEVICE int column(int tokens) { return min(lane_id() >> 2, tokens - 1); }
    DEVICE void add(const Words4* a, const char* chunk, int, int) {
        const Words4 b = *reinterpret_cast<const Words4*>(chunk);
        multiply(sum, a[0].x, a[1].x, a[0].y, a[1].y, b.x, b.y);
        multiply(other, a[0].z, a[1].z, a[0].w, a[1].w, b.z, b.w);
    }
    static DEVICE void multiply(float* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
        if constexpr (T::BF16) {
            asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
        } else {
            asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
        }
    }
};

// Signed bytes of weights times 16-bit integers (a high byte and a low one, 16 bytes apart): exact. Narrow: a token's two
// bytes are two columns of one product; else each byte has a product of its own.
template <bool NARROW> struct IntegerProduct : Cells<NARROW> {
    static constexpr int PRODUCTS = NARROW ? 1 : 2;
    int sum[PRODUCTS][4];
    struct Activations { Words4 b[PRODUCTS]; };
    DEVICE void zero() { for (auto& one : sum) for (int& v : one) v = 0; }
    DEVICE void plus(const IntegerProduct& other) {
        for (int i = 0; i < PRODUCTS; ++i)
            for (int j = 0; j < 4; ++j) sum[i][j] += other.sum[i][j];
    }
    // Where this lane's activations begin, from those of token 0.
    static DEVICE int place(int tokens, int token_stride) {
        const int column = lane_id() >> 2, token = min(NARROW ? column >> 1 : column, tokens - 1);
        return token * token_stride + (NARROW ? column & 1 : 0) * 16 + fragment_quarter() * 32;
    }
    static DEVICE Activations load(const char* x) {
        Activations all;
#pragma unroll
        for (int i = 0; i < PRODUCTS; ++i) all.b[i] = *reinterpret_cast<const Words4*>(x + i * 16);
        return all;
    }
    // The first 8 bytes of each 16, or the last.
    DEVICE void add(const Words4* a, const Activations& x, int part) {
#pragma unroll
        for (int i = 0; i < PRODUCTS; ++i) {
            if (part == 0) multiply(sum[i], a[0].x, a[1].x, a[0].y, a[1].y, x.b[i].x, x.b[i].y);
            else multiply(sum[i], a[0].z, a[1].z, a[0].w, a[1].w, x.b[i].z, x.b[i].w);
        }
    }
    DEVICE float value(int i) const { return NARROW ? float(sum[0][2 * i] * 256 + sum[0][2 * i + 1]) : float(sum[0][i] * 256 + sum[PRODUCTS - 1][i]); }
    static DEVICE void multiply(int* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
};

DEVICE uint32_t transposed(uint32_t v) {  // of 8 by 8 halves, a pair a lane
    uint32_t out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(v));
    return out;
}
// Four of them, transposed on their way from shared memory: a row of eight a lane.
DEVICE void load_transposed(uint32_t* v, const Words4* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(shared_address(row)) : "memory");
}
#include "nvidia_attention.h"

// ---- host ----
struct DeviceLimits {
    int processors, shared_block, shared_processor;
    bool dependent_launch, clusters;
};
inline int attribute(cudaDeviceAttr what, int device) {
    int v = 0;
    (void)cudaDeviceGetAttribute(&v, what, device);
    return v;
}
inline DeviceLimits device_limits() {
    int device = 0;
    (void)cudaGetDevice(&device);
    const bool hopper = attribute(cudaDevAttrComputeCapabilityMajor, device) >= 9;
    return {attribute(cudaDevAttrMultiProcessorCount, device), attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
            attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device), hopper, hopper && CLUSTER > 1};
}
template <class... ARGS> int prepare(void (*kernel)(ARGS...), const DeviceLimits& limits) {
    const int error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limits.shared_block);
    return error ? error : cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
}
inline cudaLaunchAttribute cluster_attribute(int cluster) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = cluster, attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    return attribute;
}
// How many clusters the device holds at once with one block on a processor; 0 where it cannot say. Asked once a device.
template <class... ARGS> int most_clusters(void (*kernel)(ARGS...), const DeviceLimits& limits) {
    static std::atomic<int> held[64];
    int device = 0, count = 0;
    if (cudaGetDevice(&device) || device >= 64) return 0;
    if ((count = held[device])) return count;
    if (prepare(kernel, limits)) return 0;
    cudaLaunchAttribute attribute = cluster_attribute(CLUSTER);
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(CLUSTER), config.blockDim = dim3(WAVE), config.dynamicSmemBytes = limits.shared_block;
    config.attrs = &attribute, config.numAttrs = 1;
    if (cudaOccupancyMaxActiveClusters(&count, kernel, &config)) return 0;
    return held[device] = count;
}
// The runtime's error, 0 for none. cluster: blocks of one.
template <class... ARGS>
int launch_clusters(void (*kernel)(ARGS...), int cluster, int blocks, int threads, int shared, GpuStream stream, const DeviceLimits& limits, bool dependent, ARGS... args) {
    if (const int error = prepare(kernel, limits)) return error;
    cudaLaunchAttribute attributes[2] = {cluster_attribute(cluster), {}};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    const bool early = dependent && limits.dependent_launch;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks), config.blockDim = dim3(threads), config.dynamicSmemBytes = shared, config.stream = stream;
    config.attrs = attributes + (cluster > 1 ? 0 : 1), config.numAttrs = (cluster > 1) + early;
    return cudaLaunchKernelEx(&config, kernel, args...);
}
template <class... ARGS>
int launch_kernel(void (*kernel)(ARGS...), int blocks, int threads, int shared, GpuStream stream, const DeviceLimits& limits, bool dependent, ARGS... args) {
    return launch_clusters(kernel, 1, blocks, threads, shared, stream, limits, dependent, args...);
}
