// gemv_compact: bf16 weights without loss in 12 bits, with a scale and outliers a row. dtype: 0, bf16 activations.
// unpack_compact: y[N, K] as bf16, the weight itself; ACT_SILU_GATE: of paired rows.
#include "gemv_host.h"

namespace {
constexpr int UNPACKED_STEPS = 4;  // by a block: a thread has 16 values of a row and step

inline int check_compact(const GemvArgs& a, int dtype) {
    if (dtype) return STATUS_FORMAT;
    if (!a.scale || !a.offset) return STATUS_POINTER;
    return a.group_shift < 1 ? STATUS_SIZE : STATUS_OK;
}

__global__ void __launch_bounds__(64 * UNPACKED_STEPS) unpack_kernel(const GemvArgs a, int steps) {
    const int parts = (steps + UNPACKED_STEPS - 1) / UNPACKED_STEPS, tile = blockIdx.x / parts;
    const int id = threadIdx.x, t = id & 3, step = int(blockIdx.x) % parts * UNPACKED_STEPS + (id >> 2) % UNPACKED_STEPS, r = id / (4 * UNPACKED_STEPS);
    const int64_t row = weight_row(a, tile, r);
    if (step >= steps || row >= a.n) return;
    const char* from = static_cast<const char*>(a.w) + (int64_t(tile) * steps + step) * Compact::STEP_BYTES;
    const Words4 bytes = *reinterpret_cast<const Words4*>(from + (4 * r + t) * 16);
    const uint32_t* exponents = reinterpret_cast<const uint32_t*>(from + 1024 + (4 * (r & 7) + t) * 16 + (r & 8));
    const uint32_t scale = float_to_bits(static_cast<const float*>(a.scale)[tile * 16 + r]);
    const uint32_t more = (scale >> 23) * 128 - 127 * 128;  // to a bf16's exponent
    uint32_t pairs[8];
#pragma unroll
    for (int p = 0; p < 2; ++p) {
        const Words4 v = Compact::expand(bytes, exponents[p], p);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const uint32_t w = word_of(v, j);
            pairs[4 * p + j] = scale ? ((w + more) & 0xffffu) | ((w & 0xffff0000u) + (more << 16)) : w & 0x80008000u;
        }
    }
    const int k = step * Compact::KSTEP + t * 16, left = int(a.k) - k;
    uint16_t* to = static_cast<uint16_t*>(a.y) + row * a.y_stride + k;
    if (left >= 16 && a.y_stride % 8 == 0) {
#pragma unroll
        for (int h = 0; h < 2; ++h) reinterpret_cast<Words4*>(to)[h] = {pairs[4 * h], pairs[4 * h + 1], pairs[4 * h + 2], pairs[4 * h + 3]};
    } else {
#pragma unroll
        for (int i = 0; i < 16; ++i)
            if (i < left) to[i] = static_cast<uint16_t>(pairs[i / 2] >> (16 * (i & 1)));
    }
#pragma unroll 1
    for (int four = 0; four < a.group_shift; ++four) {
        const Words4 v = outliers_of<Compact>(a, tile, r)[four];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t word = word_of(v, i), column = word & 0xffffu;
            if (column == 0xffffu) return;
            if (int(column) >= k && int(column) < k + 16) to[int(column) - k] = static_cast<uint16_t>(word >> 16);
        }
    }
}
}  // namespace

extern "C" int accelpatch_gemv_compact(const GemvArgs* a, int dtype, void* stream) {
    if (const int bad = check_compact(*a, dtype)) return bad;
    return launch_all<Compact, Bf16>(*a, static_cast<GpuStream>(stream));
}

extern "C" int accelpatch_unpack_compact(const GemvArgs* a, int dtype, void* stream) {
    if (const int bad = check_compact(*a, dtype)) return bad;
    GemvArgs whole = *a;
    whole.m = 0;
    if (const int bad = check(whole)) return bad;
    if (!a->w || !multiple_of_16(a->y)) return STATUS_POINTER;
    const int64_t each = tile_columns(*a), rows = a->activation == ACT_SILU_GATE ? a->n / 2 : a->n;
    const int64_t steps = (a->k + Compact::KSTEP - 1) / Compact::KSTEP, blocks = (rows + each - 1) / each * ((steps + UNPACKED_STEPS - 1) / UNPACKED_STEPS);
    if (blocks >= LARGEST) return STATUS_SIZE;
    const int error = launch_kernel(unpack_kernel, int(blocks), 64 * UNPACKED_STEPS, 0, static_cast<GpuStream>(stream), device_limits(), false, *a, int(steps));
    return error ? STATUS_DEVICE + error : STATUS_OK;
}
