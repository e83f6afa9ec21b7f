// int4_gemm: 9 to 64 tokens, int4 weights in tiles, groups of 128 times a power of two; a whole row is one group
// (group_shift 30). K a multiple of 8, x and its rows aligned to 16 bytes; no norm or residual, and no activation but
// the gate of interleaved tiles. dtype: 0 bf16, 1 fp16.
#include "instances.h"
#include "int4_gemm.h"

namespace {
constexpr int64_t MOST_ROWS = 64;

int check_gemm(const GemvArgs& a) {
    if (a.m < 1 || a.m > MOST_ROWS || a.n < 1 || a.k < 8 || a.k % 8 || a.n >= LARGEST || a.k >= LARGEST / 16)
        return STATUS_SIZE;
    if (!a.w || !a.x || !a.y || !a.scale || !multiple_of_16(a.x, a.x_stride * 2)) return STATUS_POINTER;
    if (a.offset_kind != OFFSET_NONE && !a.offset) return STATUS_POINTER;
    if (a.activation == ACT_SILU_GATE ? a.n % 32 : a.activation) return STATUS_FORMAT;
    return a.norm || a.residual || a.group_shift < 0 || a.group_shift > 30 ? STATUS_FORMAT : STATUS_OK;
}
template <class T> int by_tokens(const GemvArgs& a, GpuStream stream) {
    if constexpr (MOST_TOKENS > 16) {
        if (a.m > 16) return launch_gemm<T, MOST_TOKENS>(a, stream);
    }
    return launch_gemm<T, 16>(a, stream);
}
}  // namespace

extern "C" int accelpatch_int4_gemm(const GemvArgs* a, int dtype, int group_size, void* stream) {
    if (group_size < 128) return STATUS_FORMAT;
    if (const int bad = check_gemm(*a)) return bad;
    const auto s = static_cast<GpuStream>(stream);
    return by_dtype(dtype, [&](auto t) { return by_tokens<decltype(t)>(*a, s); });
}
