// gemv_compact: bf16 weights without loss in 12 bits, with a scale and outliers a row. dtype: 0, bf16 activations.
// unpack_compact: y[N, K] as bf16, the weight itself; ACT_SILU_GATE: of interleaved rows.
#include "gemv_host.h"

namespace {
constexpr int UNPACK_THREADS = 256,
              UNPACKED_STEPS = 2 * UNPACK_THREADS / 32;  // by a block: 32 lanes a step, each with 16 values of two rows

constexpr int MOST_FOURS = 1 << 14;  // of outliers: more than a row has columns

inline int check_compact(const GemvArgs& a, int dtype) {
    if (dtype) return STATUS_FORMAT;
    if (!a.scale || !a.offset) return STATUS_POINTER;
    return a.group_shift < 1 || a.group_shift > MOST_FOURS || a.k >= 0xffff ? STATUS_SIZE : STATUS_OK;
}

// A bf16 of the codes' window as it was. `scale`: its row's, as bits.
DEVICE uint32_t in_place(uint32_t pair, uint32_t scale) {
    const uint32_t more = (scale >> 23) * 128 - 127 * 128;  // to its exponent
    return scale ? ((pair + more) & 0xffffu) | ((pair & 0xffff0000u) + (more << 16)) : pair & 0x80008000u;
}

// 16 values of a row from column k0 on, 8 of which `low` and `high` hold each. Neighbouring lanes, with 16 values each
// from k0 on, exchange halves: then each store fills whole sectors.
DEVICE void store_row(uint16_t* to, const Words4& low, const Words4& high, int left, bool vectors) {
    const bool odd = threadIdx.x & 1;
    const Words4 give = odd ? low : high,
                 received = {lane_xor(give.x, 1), lane_xor(give.y, 1), lane_xor(give.z, 1), lane_xor(give.w, 1)};
    const Words4 parts[2] = {odd ? received : low, odd ? high : received};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int at = 16 * i + (odd ? 8 : 0);
        if (vectors && left >= at + 8) {
            *reinterpret_cast<Words4*>(to + at) = parts[i];
        } else {
#pragma unroll
            for (int e = 0; e < 8; ++e)
                if (at + e < left) to[at + e] = static_cast<uint16_t>(word_of(parts[i], e / 2) >> (16 * (e & 1)));
        }
    }
}

__global__ void __launch_bounds__(UNPACK_THREADS) unpack_kernel(const GemvArgs a, int steps) {
    const int parts = (steps + UNPACKED_STEPS - 1) / UNPACKED_STEPS, tile = blockIdx.x / parts,
              begin = int(blockIdx.x) % parts * UNPACKED_STEPS;
    const int lane = threadIdx.x & 31, t = lane & 3;
    const char* tiles = static_cast<const char*>(a.w) + int64_t(tile) * steps * Compact::STEP_BYTES;
    const uint32_t* scales = static_cast<const uint32_t*>(a.scale) + tile * 16;
    uint16_t* y = static_cast<uint16_t*>(a.y);
    Words4 bytes[2][2], exponents[2];
#pragma unroll
    for (int u = 0; u < 2; ++u) {
        const int step = min(begin + u * (UNPACKED_STEPS / 2) + int(threadIdx.x) / 32, steps - 1);
        const Words4* from = reinterpret_cast<const Words4*>(tiles + int64_t(step) * Compact::STEP_BYTES) + lane;
        bytes[u][0] = from[0], bytes[u][1] = from[32], exponents[u] = from[64];
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int r = lane / 4 + 8 * h;
        const uint32_t scale = scales[r];
        const int64_t row = weight_row(a, tile, r);
#pragma unroll
        for (int u = 0; u < 2; ++u) {
            const int step = begin + u * (UNPACKED_STEPS / 2) + int(threadIdx.x) / 32,
                      k0 = step * Compact::KSTEP + t / 2 * 32;
            Words4 values[2];
#pragma unroll
            for (int p = 0; p < 2; ++p) {
                const Words4 v = Compact::expand(bytes[u][h], word_of(exponents[u], 2 * h + p), p);
                values[p] = {in_place(v.x, scale), in_place(v.y, scale), in_place(v.z, scale), in_place(v.w, scale)};
            }
            const bool there = step < steps && row < a.n;
            store_row(y + (there ? row : 0) * a.y_stride + k0, values[0], values[1], there ? int(a.k) - k0 : 0,
                a.y_stride % 8 == 0);
        }
    }
    __syncthreads();
    const int from = begin * Compact::KSTEP, end = from + UNPACKED_STEPS * Compact::KSTEP, per_row = fours(a) * 4;
    const uint32_t* outliers = static_cast<const uint32_t*>(a.offset) + int64_t(tile) * 16 * per_row;
    for (int i = threadIdx.x; i < 16 * per_row; i += UNPACK_THREADS) {
        const int column = int(outliers[i] & 0xffffu);
        const int64_t row = weight_row(a, tile, i / per_row);
        if (column >= from && column < end && column < int(a.k) && row < a.n)
            y[row * a.y_stride + column] = static_cast<uint16_t>(outliers[i] >> 16);
    }
}
}  // namespace

extern "C" int accelpatch_gemv_compact(const GemvArgs* a, int dtype, void* stream) {
    if (const int bad = check_compact(*a, dtype)) return bad;
    return launch_all<Compact, Bf16>(*a, static_cast<GpuStream>(stream));
}

extern "C" int accelpatch_unpack_compact(const GemvArgs* a, int dtype, void* stream) {
    if (const int bad = check_compact(*a, dtype)) return bad;
    GemvArgs checked = *a;
    checked.m = 0;
    if (const int bad = check(checked)) return bad;
    if (!a->w || !multiple_of_16(a->y)) return STATUS_POINTER;
    const int64_t each = tile_columns(*a), rows = a->activation == ACT_SILU_GATE ? a->n / 2 : a->n;
    const int64_t steps = (a->k + Compact::KSTEP - 1) / Compact::KSTEP,
                  blocks = (rows + each - 1) / each * ((steps + UNPACKED_STEPS - 1) / UNPACKED_STEPS);
    if (blocks >= LARGEST) return STATUS_SIZE;
    const int error = launch_kernel(unpack_kernel, int(blocks), UNPACK_THREADS, 0, static_cast<GpuStream>(stream),
        device_limits(), false, *a, int(steps));
    return error ? STATUS_DEVICE + error : STATUS_OK;
}
