// Integer arithmetic of a pair of inputs a thread: whatever clang makes of it.
#include <hip/hip_runtime.h>

#define KERNEL(name, T, ...)                                                   \
    extern "C" __global__ void name(const T* as, const T* bs, T* out, int n) { \
        const int i = blockIdx.x * blockDim.x + threadIdx.x;                   \
        if (i >= n) return;                                                    \
        const T a = as[i], b = bs[i];                                          \
        __VA_ARGS__                                                            \
    }

KERNEL(signed32, int, {
    const int c = b == 0 || (a == INT_MIN && b == -1) ? 1 : b;
    int* o = out + 12 * i;
    o[0] = a / c, o[1] = a % c, o[2] = a * b, o[3] = __mulhi(a, b), o[4] = a >> (b & 31), o[5] = min(a, b);
    o[6] = max(a, b), o[7] = a / 7, o[8] = a % 1000, o[9] = __builtin_amdgcn_sbfe(a, b & 31, 5);
    o[10] = (signed char)(a >> 8) + (short)b, o[11] = abs(a);
})
KERNEL(unsigned32, unsigned, {
    const unsigned c = b ? b : 1;
    unsigned* o = out + 12 * i;
    o[0] = a / c, o[1] = a % c, o[2] = __umulhi(a, b), o[3] = a << (b & 31) | a >> (32 - (b & 31) & 31);
    o[4] = __popc(a) + __clz(int(b | 1)), o[5] = __ffs(int(b)), o[6] = __brev(a), o[7] = a / 10u;
    o[8] = __builtin_amdgcn_perm(a, b, 0x0c010704u), o[9] = __builtin_amdgcn_alignbit(a, b, 13);
    o[10] = (a & 0xff00ff00u) | (b & 0x00ff00ffu), o[11] = __builtin_amdgcn_ubfe(a, 7, 11) + (a + b < a);
})
KERNEL(signed64, long, {
    const long c = b == 0 || (a == LONG_MIN && b == -1) ? 1 : b;
    long* o = out + 10 * i;
    o[0] = a / c, o[1] = a % c, o[2] = a * b, o[3] = __mul64hi(a, b), o[4] = a >> (b & 63), o[5] = a - b;
    o[6] = a < b ? a : b, o[7] = long(int(a)) * int(b) + b, o[8] = a / 1000003, o[9] = a > b && a != 0;
})
KERNEL(unsigned64, unsigned long, {
    const unsigned long c = b ? b : 1;
    unsigned long* o = out + 8 * i;
    o[0] = a / c, o[1] = a % c, o[2] = __umul64hi(a, b), o[3] = a << (b & 63), o[4] = a >> (b & 63);
    o[5] = __popcll(a) + __clzll(long(b | 1)), o[6] = a + b, o[7] = (a & 0xffffffffu) * (b & 0xffffffffu) + a;
})
// The 16 and 8 bits of an int each.
KERNEL(narrow, int, {
    using Short2 = short __attribute__((ext_vector_type(2)));
    using Ushort2 = unsigned short __attribute__((ext_vector_type(2)));
    int* o = out + 10 * i;
    const Short2 p = __builtin_bit_cast(Short2, a), q = __builtin_bit_cast(Short2, b);
    const Ushort2 u = __builtin_bit_cast(Ushort2, a), v = __builtin_bit_cast(Ushort2, b);
    o[0] = __builtin_bit_cast(int, p + q), o[1] = __builtin_bit_cast(int, p* q);
    o[2] = __builtin_bit_cast(int, __builtin_elementwise_max(p, q));
    o[3] = __builtin_bit_cast(int, __builtin_elementwise_min(u, v));
    o[4] = __builtin_bit_cast(int, p >> Short2{3, 5}), o[5] = __builtin_bit_cast(int, u << (v & Ushort2{15, 15}));
    o[6] = __builtin_amdgcn_sdot4(a, b, 1000, false), o[7] = int(__builtin_amdgcn_udot4(a, b, 77u, false));
    o[8] = __builtin_amdgcn_sdot2(p, q, -5, false), o[9] = __builtin_amdgcn_sdot8(a, b, 3, false);
})
// Threads of a wave take ways of their own: steps until 1, with an early end.
KERNEL(collatz, int, {
    long v = a & 0xfff;
    int steps = 0;
    while (v > 1) {
        if (v & 1) v = 3 * v + 1;
        else v >>= 1;
        if (++steps == 100) break;
        if (v % 37 == 5) {
            for (int j = 0; j < (b & 3); ++j) steps += j & int(v);
            continue;
        }
        if (steps > 60 && v < 20) return;
    }
    switch (b & 7) {
        case 0: steps += 1000; break;
        case 1: steps *= 3;
        case 2: steps -= 5; break;
        case 5: steps ^= 0x55; break;
        default: steps = -steps;
    }
    out[i] = steps;
})
__constant__ int TABLE[16] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3};
KERNEL(tables, int, {
    int held[8];
    _Pragma("nounroll") for (int j = 0; j < 8; ++j) held[j] = TABLE[(a + j) & 15] * b;
    out[i] = held[b & 7] + TABLE[blockIdx.x & 15];
})
