// AMD, gfx90a, gfx942 and gfx950: wavefronts of 64 lanes, which the code calls warps, 16x16 matrix instructions,
// weights one stage ahead in registers. nvidia.h and the headers that it includes say what the functions do.
#pragma once

using GpuStream = hipStream_t;
constexpr int WARP_SIZE = 64;
constexpr int BLOCKS_RESIDENT = 1;
constexpr bool SHARED_STAGES = false;
constexpr bool LAUNCHES_OVERLAP = false;  // a kernel starts when the one before it has ended
constexpr bool BLOCKS_MEET = false;       // blocks of a launch do not wait for each other
constexpr int RESERVED_SHARED = 0;

using Half2 = _Float16 __attribute__((ext_vector_type(2)));
using Half4 = _Float16 __attribute__((ext_vector_type(4)));
using Short4 = short __attribute__((ext_vector_type(4)));
using Float4 = float __attribute__((ext_vector_type(4)));
using Int4Vector = int __attribute__((ext_vector_type(4)));

DEVICE int lane_id() { return threadIdx.x % WARP_SIZE; }
template <class V> DEVICE V lane_xor(V value, int mask) { return __shfl_xor(value, mask, WARP_SIZE); }
DEVICE float from_lane(float value, int lane) { return __shfl(value, lane, WARP_SIZE); }
DEVICE int lowest_bit(uint32_t bits) { return __ffs(int(bits)) - 1; }
DEVICE uint32_t lane_vote(bool yes) { return static_cast<uint32_t>(__ballot(yes)); }  // of the first 32 lanes

// ---- conversions and bits ----
DEVICE uint32_t float_to_bf16(float value) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (bits >> 16) | 0x40u;
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}
DEVICE uint32_t floats_to_bf16(float low, float high) { return float_to_bf16(low) | float_to_bf16(high) << 16; }
DEVICE float half_to_float(uint32_t bits) {
    return static_cast<float>(__builtin_bit_cast(_Float16, static_cast<uint16_t>(bits)));
}
DEVICE uint32_t float_to_half(float value) { return __builtin_bit_cast(uint16_t, static_cast<_Float16>(value)); }
DEVICE uint32_t floats_to_half(float low, float high) { return float_to_half(low) | float_to_half(high) << 16; }
// Whether the hardware has 8-bit floats of this form (e4m3.h).
#if defined(__gfx942__)
template <bool FNUZ> constexpr bool E4M3_HERE = FNUZ;
constexpr float E4M3_LARGEST = 240.f;
#elif defined(__gfx950__)
template <bool FNUZ> constexpr bool E4M3_HERE = !FNUZ;
constexpr float E4M3_LARGEST = 448.f;
#else
template <bool> constexpr bool E4M3_HERE = false;
constexpr float E4M3_LARGEST = 0.f;
#endif
DEVICE void e4m3_to_halves(uint32_t, uint32_t&, uint32_t&) {}         // never called: the matrix unit takes bytes
DEVICE uint32_t floats_to_e4m3(float a, float b, float c, float d) {  // saturated here, since the instruction does not
#if defined(__gfx942__) || defined(__gfx950__)
    const auto within = [](float v) { return fminf(fmaxf(v, -E4M3_LARGEST), E4M3_LARGEST); };
    const int low = __builtin_amdgcn_cvt_pk_fp8_f32(within(a), within(b), 0, false);
    return uint32_t(__builtin_amdgcn_cvt_pk_fp8_f32(within(c), within(d), low, true));
#else
    return 0;  // never called
#endif
}
// May be contracted to an fma: attention has one kernel here, whose bits need not agree with those of another.
DEVICE float rounded_multiply(float a, float b) { return a * b; }
DEVICE float fast_exp2(float v) { return __builtin_amdgcn_exp2f(v); }
DEVICE float fast_reciprocal(float v) { return __builtin_amdgcn_rcpf(v); }  // within a unit in the last place
DEVICE uint32_t pair_fma(uint32_t a, uint32_t b, uint32_t c) {              // of fp16 pairs
    return __builtin_bit_cast(uint32_t, __builtin_elementwise_fma(__builtin_bit_cast(Half2, a),
                                            __builtin_bit_cast(Half2, b), __builtin_bit_cast(Half2, c)));
}
DEVICE uint32_t pair_max(uint32_t a, uint32_t b) {  // of pairs of unsigned 16-bit integers
    using Pair = uint16_t __attribute__((ext_vector_type(2)));
    return __builtin_bit_cast(
        uint32_t, __builtin_elementwise_max(__builtin_bit_cast(Pair, a), __builtin_bit_cast(Pair, b)));
}
// The sum of a word's four bytes, signed or not, plus `more`.
template <bool SIGNED> DEVICE int sum_of_bytes(uint32_t bytes, int more) {
    if constexpr (SIGNED) return __builtin_amdgcn_sdot4(int(bytes), 0x01010101, more, false);
    else return int(__builtin_amdgcn_udot4(bytes, 0x01010101u, uint32_t(more), false));
}
DEVICE uint32_t masked_xor(uint32_t a, uint32_t mask, uint32_t bits) { return (a & mask) ^ bits; }
// Whether any thread of the block passes `yes`, in this call or in one before with the same word. Precondition: all
// threads of the block call it, and the word, in shared memory, was 0 before the first call. It has two barriers.
DEVICE bool block_any(bool yes, uint32_t& word) {
    if (yes) word = 1;
    __syncthreads();
    const bool any = word;
    __syncthreads();  // all threads have read the word before a later call may set it
    return any;
}
// Nothing: the order of the compiler is kept.
template <class V> DEVICE void compute_here(V&) {}
// Four of the bytes of a (0 to 3) and b (4 to 7). Each nibble of SELECT chooses one, the lowest nibble the lowest byte.
template <uint32_t SELECT> DEVICE uint32_t permute(uint32_t a, uint32_t b) {
    return __builtin_amdgcn_perm(
        b, a, (SELECT & 15u) | (SELECT >> 4 & 15u) << 8 | (SELECT >> 8 & 15u) << 16 | (SELECT >> 12 & 15u) << 24);
}
// Looks up the nibbles of a word in a table of 16 bytes a, b, c, d (a has entries 0 to 3): those with even numbers (odd
// is 0), or with odd numbers (odd is 1).
constexpr bool BOOK_IN_HALVES = false;
struct NibbleLookup {
    uint32_t word;
    DEVICE explicit NibbleLookup(uint32_t word) : word(word) {}
    // Which of the eight values of a tile's word is in byte e of the results, those of even nibbles first.
    static constexpr DEVICE int order(int e) { return e / 2 + e % 2 * 4; }
    DEVICE void operator()(uint32_t a, uint32_t b, uint32_t c, uint32_t d, int odd, uint32_t* out) const {
        const uint32_t codes = odd ? word >> 4 : word, at = codes & 0x07070707u,
                       from = (codes >> 1 & 0x04040404u) | 0x03020100u;
        out[0] = __builtin_amdgcn_perm(__builtin_amdgcn_perm(d, c, at), __builtin_amdgcn_perm(b, a, at), from);
    }
};

// ---- memory ----
DEVICE Words4 load_activation16(const void* source) { return *static_cast<const Words4*>(source); }
DEVICE Words4 load_activation16(const void* source, bool there) {
    return there ? load_activation16(source) : Words4{0, 0, 0, 0};
}
DEVICE uint32_t load_activation2(const void* source) { return *static_cast<const uint16_t*>(source); }
DEVICE uint32_t load_activation4(const void* source) { return *static_cast<const uint32_t*>(source); }
DEVICE void store_activation2(void* into, uint32_t v) { *static_cast<uint16_t*>(into) = static_cast<uint16_t>(v); }
// Loads BYTES with a non-temporal hint; zeros, without access to memory, where not `there`. The cast names the global
// address space: for a pointer that a loop carries the compiler would otherwise emit a flat load.
template <int BYTES, int AT = 0> DEVICE void stream_copy(void* into, const void* source, bool there) {
    static_assert(AT == 0, "nothing is copied piece by piece");
    using Vector = uint32_t __attribute__((ext_vector_type(BYTES / 4)));
    Vector v = 0;
    if (there) v = __builtin_nontemporal_load((const __attribute__((address_space(1))) Vector*)source);
    for (int i = 0; i < BYTES / 4; ++i) static_cast<uint32_t*>(into)[i] = v[i];
}
DEVICE void copy_activation16(void* into, const void* source, bool there) {
    *static_cast<Words4*>(into) = there ? load_activation16(source) : Words4{0, 0, 0, 0};
}
DEVICE void stream_once16(void* into, const void* source, bool there) { stream_copy<16>(into, source, there); }
DEVICE void copies_done(int) {}
DEVICE void commit_copies() {}
template <int> DEVICE void wait_copies() {}

DEVICE void prefetch_line(const void*) {}
DEVICE void prefetch_l2(const void*, int) {}  // kernels do not overlap, so there is no time for it

// ---- synchronisation: no dependent launch; a named barrier is that of the workgroup, and group_arrive waits too ----
DEVICE void grid_release() {}
DEVICE void grid_wait() {}
template <bool> DEVICE void signal_add(int32_t*, int) {}
DEVICE void signal_wait(const int32_t*, int, bool) {}
DEVICE int next_number(int32_t*, int of) { return of; }  // last_call() is false: no signals are reset
DEVICE void linger() {}
DEVICE void warp_sync() {}  // lanes read what other lanes stored only after a barrier
DEVICE void group_sync(int, int) { __syncthreads(); }
DEVICE void group_arrive(int, int) { __syncthreads(); }

// Makes this thread's stores visible to the device: the fence of count_up() is that of its one caller.
DEVICE void publish() { __threadfence(); }
DEVICE void store_relaxed16(void* into, const Words4& v) { *static_cast<Words4*>(into) = v; }
DEVICE Words4 load_relaxed16(const void* source) { return *static_cast<const Words4*>(source); }
DEVICE void spin(int&) { __builtin_trap(); }  // never called: what is read has been counted before
DEVICE int count_up(int32_t* counter, int by) {
    __threadfence();
    const int before = atomicAdd(counter, by);
    __threadfence();
    return before;
}

// ---- no clusters ----
constexpr int CLUSTER = 1;
constexpr int CLUSTER_DEPTH = 1;
template <class F> constexpr int CLUSTER_DEEP = 1;
using Mbarrier = uint64_t;
#include "no_cluster.h"
DEVICE uint32_t transposed(uint32_t v) { return v; }  // never called
DEVICE void cluster_sync() {}
template <class V> DEVICE V* in_peer(V* here, int) { return here; }

// ---- matrix instructions ----
// 16 rows by 16 of K, times 16 by 16 columns.
template <class T> DEVICE void multiply_halves(float* sum, uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1) {
    const uint64_t a = a0 | (uint64_t(a1) << 32), b = b0 | (uint64_t(b1) << 32);
    Float4 c = {sum[0], sum[1], sum[2], sum[3]};
    if constexpr (T::BF16)
        c = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(
            __builtin_bit_cast(Short4, a), __builtin_bit_cast(Short4, b), c, 0, 0, 0);
    else
        c = __builtin_amdgcn_mfma_f32_16x16x16f16(
            __builtin_bit_cast(Half4, a), __builtin_bit_cast(Half4, b), c, 0, 0, 0);
    for (int i = 0; i < 4; ++i) sum[i] = c[i];
}
constexpr bool UNSIGNED_BYTES = false;  // multiply_bytes takes signed bytes only
// 16 rows by 32 of K, signed bytes, times 32 by 16 columns.
DEVICE void multiply_bytes(int* sum, uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1) {
    Int4Vector c = {sum[0], sum[1], sum[2], sum[3]};
#if defined(__gfx90a__)
    c = __builtin_amdgcn_mfma_i32_16x16x16i8(int(a0), int(b0), c, 0, 0, 0);
    c = __builtin_amdgcn_mfma_i32_16x16x16i8(int(a1), int(b1), c, 0, 0, 0);
#else
    c = __builtin_amdgcn_mfma_i32_16x16x32_i8(long(a0 | uint64_t(a1) << 32), long(b0 | uint64_t(b1) << 32), c, 0, 0, 0);
#endif
    for (int i = 0; i < 4; ++i) sum[i] = c[i];
}
// The same for 8-bit floats of the hardware's form.
DEVICE void multiply_e4m3(float* sum, uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1) {
#if defined(__gfx942__) || defined(__gfx950__)
    Float4 c = {sum[0], sum[1], sum[2], sum[3]};
    c = __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(
        long(a0 | uint64_t(a1) << 32), long(b0 | uint64_t(b1) << 32), c, 0, 0, 0);
    for (int i = 0; i < 4; ++i) sum[i] = c[i];
#endif
}
#include "amd_mma.h"
#include "amd_attention.h"

// ---- host ----
struct DeviceLimits {
    int sms, shared_block, shared_sm;
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
inline void clear(int32_t* number, GpuStream stream) { (void)hipMemsetAsync(number, 0, sizeof(*number), stream); }
// The runtime's error, 0 for none.
template <class... ARGS>
int launch_kernel(void (*kernel)(ARGS...), int blocks, int threads, int shared, GpuStream stream, const DeviceLimits&,
    bool, ARGS... args) {
    (void)hipGetLastError();
    kernel<<<dim3(blocks), dim3(threads), shared, stream>>>(args...);
    return hipGetLastError();
}
template <class... ARGS>
int launch_clusters(void (*kernel)(ARGS...), int, int blocks, int threads, int shared, GpuStream stream,
    const DeviceLimits& limits, bool dependent, ARGS... args) {
    return launch_kernel(kernel, blocks, threads, shared, stream, limits, dependent, args...);
}
