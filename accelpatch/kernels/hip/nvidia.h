// NVIDIA, sm_80 and later: warps of 32, m16n8 matrix products, a multi-stage buffer in shared memory, dependent launch
// (Hopper on).
#pragma once
#include <atomic>

using GpuStream = cudaStream_t;
constexpr int WARP_SIZE = 32;
constexpr int BLOCKS_RESIDENT = 2;       // of a kernel on an SM: this one and its successor
constexpr bool SHARED_STAGES = true;     // or else one stage ahead, in registers
constexpr bool BLOCKS_MEET = true;       // blocks of a launch that all find place at once may wait for each other
constexpr bool LAUNCHES_OVERLAP = true;  // a kernel may begin before the one before it has ended
constexpr int RESERVED_SHARED = 1024;    // bytes of a block that are the system's

DEVICE int lane_id() { return threadIdx.x & 31; }
template <class V> DEVICE V lane_xor(V value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
DEVICE float from_lane(float value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
DEVICE int lowest_bit(uint32_t bits) { return __ffs(int(bits)) - 1; }
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
DEVICE float rounded_multiply(float a, float b) { return __fmul_rn(a, b); }  // never part of a fused one
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
// Of a word, and more.
template <bool SIGNED> DEVICE int sum_of_bytes(uint32_t bytes, int more) {
    return SIGNED ? __dp4a(int(bytes), 0x01010101, more) : int(__dp4a(bytes, 0x01010101u, uint32_t(more)));
}
DEVICE uint32_t masked_xor(uint32_t a, uint32_t mask, uint32_t bits) {  // in one instruction
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
    return d;
}
DEVICE uint32_t transposed(uint32_t v) {  // of 8 by 8 halves, a pair a lane
    uint32_t out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(v));
    return out;
}
// Whether any thread of the block says yes; all of them call it, and it is a barrier. Others do it by a word of shared
// memory.
DEVICE bool block_any(bool yes, uint32_t&) { return __syncthreads_or(yes); }
// Worked out by here, however late it is used.
DEVICE void compute_here(int& v) { asm volatile("" : "+r"(v)); }
DEVICE void compute_here(const char*& v) { asm volatile("" : "+l"(v)); }
// Four bytes of a (0 to 3) and b (4 to 7), one in each nibble of SELECT, the lowest first.
template <uint32_t SELECT> DEVICE uint32_t permute(uint32_t a, uint32_t b) { return __byte_perm(a, b, SELECT); }

// ---- memory ----
DEVICE uint32_t shared_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }
// What another kernel may just have written: through L2, never a stale L1 line.
DEVICE Words4 load_activation16(const void* source) {
    Words4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(source)
        : "memory");
    return v;
}
// The same, or zeros, and nothing read, where not `there`: with no branch.
DEVICE Words4 load_activation16(const void* source, bool there) {
    Words4 v;
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %5, 0;\n\tmov.b32 %0, 0;\n\tmov.b32 %1, 0;\n\tmov.b32 %2, 0;\n\tmov.b32 "
        "%3, 0;\n\t"
        "@p ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];\n\t}"
        : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
        : "l"(source), "r"(int(there))
        : "memory");
    return v;
}
DEVICE uint32_t load_activation2(const void* source) {
    uint16_t v;
    asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(v) : "l"(source) : "memory");
    return v;
}
DEVICE uint32_t load_activation4(const void* source) {
    uint32_t v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(source) : "memory");
    return v;
}
// What the next kernel may read before this one has ended, in no order with anything else. It may do so 16 bytes at a
// time: PTX does not speak of races of two sizes; an aligned half is whole in L2, which all of these go to.
DEVICE void store_activation2(void* into, uint32_t v) {
    asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(into), "h"(static_cast<uint16_t>(v)) : "memory");
}
// BYTES into the multi-stage buffer, asynchronously; zeros, and nothing read, where not `there`. AT: from both
// addresses on.
template <int BYTES, int AT = 0> DEVICE void stream_copy(void* into, const void* source, bool there) {
    static_assert(AT == 0 || BYTES == 16, "whole pieces alone lie behind each other");
    const int bytes = there ? BYTES : 0;
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0+%3], [%1+%3], 16, %2;" ::"r"(shared_address(into)),
            "l"(source), "r"(bytes), "n"(AT)
            : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(into)), "l"(source),
            "n"(BYTES), "r"(bytes)
            : "memory");
    }
}
// 16 bytes that are read once: they leave L2 before all else, so that masks and what blocks exchange stay there. The
// exclusive or is with a zero that ptxas does not know: where it split the address, a part of it in a uniform register,
// that part was written over half of the policy, and the GPU ended the kernel with an illegal instruction (CUDA 13.0).
DEVICE void stream_once16(void* into, const void* source, bool there) {
    asm volatile(
        "{\n\t.reg .b64 once;\n\tcreatepolicy.fractional.L2::evict_first.b64 once, 1.0;\n\t"
        "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, once;\n\t}" ::"r"(
            shared_address(into) ^ blockIdx.z),
        "l"(source), "r"(there ? 16 : 0)
        : "memory");
}
// 16 bytes of activations into shared memory, asynchronously and through L2; zeros, and nothing read, where not
// `there`.
DEVICE void copy_activation16(void* into, const void* source, bool there) { stream_copy<16>(into, source, there); }
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for the oldest of DEPTH stages.
template <int DEPTH> DEVICE void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 1) : "memory"); }
// Waits for all copies but those of so many stages (up to two) asked for last.
DEVICE void copies_done(int but) { but == 2 ? wait_copies<3>() : but == 1 ? wait_copies<2>() : wait_copies<1>(); }

DEVICE void prefetch_l2(const void* source, int bytes) {  // pieces of 16 bytes
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
#endif
}

DEVICE void prefetch_line(const void* source) { asm volatile("prefetch.global.L2 [%0];" ::"l"(source) : "memory"); }

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
// Adds to a number that another kernel waits for: after all that the block wrote before a barrier, or in no ORDER with
// that, which is faster: then who reads a word that is still SENTINEL reads it again.
template <bool ORDER> DEVICE void signal_add(int32_t* number, int by) {
    if constexpr (ORDER) asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(number), "r"(by) : "memory");
    else asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(number), "r"(by) : "memory");
}
// One thread waits until a number of the kernel before has come so far; behind a barrier all threads may read what it
// signals in that order. After some hundred microseconds it waits for that kernel's end instead, should it not signal
// at all.
DEVICE void signal_wait(const int32_t* number, int enough, bool order) {
#pragma unroll 1
    for (int patience = 0; patience < 2048; ++patience) {
        int now;
        asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];"
            : "=r"(now)
            : "l"(number)
            : "memory");  // acquiring each time would empty L1 each time
        if (now >= enough) {
            if (order) asm volatile("fence.acq_rel.gpu;" ::: "memory");
            return;
        }
        __nanosleep(64);
    }
    grid_wait();
}
// Words that blocks of a launch exchange, each whole by itself.
DEVICE void store_relaxed16(void* into, const Words4& v) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(into), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
        : "memory");
}
DEVICE Words4 load_relaxed16(const void* source) {
    Words4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(source)
        : "memory");
    return v;
}
// Between two looks for what another block of the launch stores. Looking in vain for many seconds ends in an error.
DEVICE void spin(int& looks) {
    if (++looks == 1 << 24) asm volatile("trap;");
    __nanosleep(20);
}
// 0, 1 and so on to `of` less one, a call each; then from zero again.
DEVICE int next_number(int32_t* number, int of) { return int(atomicInc(reinterpret_cast<unsigned*>(number), of - 1)); }
// A barrier of `threads` threads that share `name` (0 to 7); those that only arrive go on at once.
DEVICE void group_sync(int name, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(name + 1), "r"(threads) : "memory");
}
DEVICE void warp_sync() { __syncwarp(); }
DEVICE void linger() {  // a microsecond
#if __CUDA_ARCH__ >= 700
    __nanosleep(1000);
#endif
}
DEVICE void group_arrive(int name, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(name + 1), "r"(threads) : "memory");
}

DEVICE void publish() {}  // what this thread wrote, before a barrier and count_up(): those two do
// Adds after all that the block published before a barrier and before all that it reads behind one; what was there.
DEVICE int count_up(int32_t* counter, int by) {
    int before;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(by) : "memory");
    return before;
}

#include "nvidia_cluster.h"

// ---- matrix products ----
// 16 rows by 16 of K, times 16 by 8 columns.
template <class T>
DEVICE void multiply_halves(float* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    if constexpr (T::BF16) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
}
// 16 rows by 32 of K, signed bytes, times 32 by 8 columns of bytes that have a sign or not.
constexpr bool UNSIGNED_BYTES = true;
DEVICE void multiply_bytes(
    int* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, bool sign) {
    if (sign)
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Four matrices of 8 by 8 halves, transposed on their way from shared memory: a row of eight a lane.
DEVICE void load_transposed(uint32_t* v, const Words4* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
        : "r"(shared_address(row))
        : "memory");
}
#include "nvidia_mma.h"
#include "nvidia_attention.h"

// ---- host ----
struct DeviceLimits {
    int sms, shared_block, shared_sm;
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
    return {attribute(cudaDevAttrMultiProcessorCount, device),
        attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
        attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device), hopper, hopper && CLUSTER > 1};
}
template <class... ARGS> int prepare(void (*kernel)(ARGS...), const DeviceLimits& limits) {
    const int error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limits.shared_block);
    return error ? error
                 : cudaFuncSetAttribute(
                       kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
}
inline cudaLaunchAttribute cluster_attribute(int cluster) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = cluster, attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    return attribute;
}
// How many clusters the device holds at once with one block on an SM; 0 where it cannot say. Asked once a device.
template <class... ARGS> int most_clusters(void (*kernel)(ARGS...), const DeviceLimits& limits) {
    static std::atomic<int> held[64];
    int device = 0, count = 0;
    if (cudaGetDevice(&device) || device >= 64) return 0;
    if ((count = held[device])) return count;
    if (prepare(kernel, limits)) return 0;
    cudaLaunchAttribute attribute = cluster_attribute(CLUSTER);
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(CLUSTER), config.blockDim = dim3(WARP_SIZE), config.dynamicSmemBytes = limits.shared_block;
    config.attrs = &attribute, config.numAttrs = 1;
    if (cudaOccupancyMaxActiveClusters(&count, kernel, &config)) return 0;
    return held[device] = count;
}
inline void clear(int32_t* number, GpuStream stream) { (void)cudaMemsetAsync(number, 0, sizeof(*number), stream); }
// The runtime's error, 0 for none. cluster: blocks of one.
template <class... ARGS>
int launch_clusters(void (*kernel)(ARGS...), int cluster, int blocks, int threads, int shared, GpuStream stream,
    const DeviceLimits& limits, bool dependent, ARGS... args) {
    if (const int error = prepare(kernel, limits)) return error;
    cudaLaunchAttribute attributes[2] = {cluster_attribute(cluster), {}};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    const bool signalled_k_tiles = dependent && limits.dependent_launch;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks), config.blockDim = dim3(threads), config.dynamicSmemBytes = shared,
    config.stream = stream;
    config.attrs = attributes + (cluster > 1 ? 0 : 1), config.numAttrs = (cluster > 1) + signalled_k_tiles;
    return cudaLaunchKernelEx(&config, kernel, args...);
}
template <class... ARGS>
int launch_kernel(void (*kernel)(ARGS...), int blocks, int threads, int shared, GpuStream stream,
    const DeviceLimits& limits, bool dependent, ARGS... args) {
    return launch_clusters(kernel, 1, blocks, threads, shared, stream, limits, dependent, args...);
}
