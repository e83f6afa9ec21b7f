// Arguments of a launch and their limits, with no header of HIP or CK: checked in 64-bit arithmetic before the launch.
#pragma once
#include <cstdint>

namespace w8a8 {

enum Status : int {
    STATUS_OK = 0,
    STATUS_SIZE = 1,
    STATUS_POINTER = 2,
    STATUS_STRIDE = 3,
    STATUS_ARCH = 4,
    STATUS_DEVICE = 1000  // and the runtime's error
};

// Strides in elements. A[batch][m, k], B[batch][n, k] int8; D[batch][m, n], its row stride 0 for a vector [n]; E[batch]
// [m, n]; row_scale[m], column_scale[n] float.
struct GemmArgs {
    const void *a, *b, *d, *row_scale, *column_scale;
    void* e;
    int64_t batch, m, n, k;
    int64_t a_stride, b_stride, d_stride, e_stride;
    int64_t a_batch_stride, b_batch_stride, d_batch_stride, e_batch_stride;
    float alpha, beta;
    int32_t relu;
};

// What an instance takes. vectors: elements of a load along K, and of a load or store along N.
struct Instance {
    int64_t rows, columns, k_tile, k_vector, n_vector, d_bytes, e_bytes;
    bool has_d, scaled;
};

constexpr int64_t LIMIT = int64_t(1) << 31;  // bytes that CK's 32-bit offsets reach, rows of padding included
constexpr int64_t LONGEST = (1 << 17) - 1;   // K up to which 128 * 128 * K is an int32

inline int64_t round_up(int64_t v, int64_t to) { return (v + to - 1) / to * to; }

// Whether a matrix lies within LIMIT: its padded rows, and the base of its last batch, which CK keeps in 32 bits.
inline bool within(int64_t rows, int64_t columns, int64_t stride, int64_t batch, int64_t batch_stride, int64_t bytes) {
    if (stride < 0 || batch_stride < 0 || stride >= LIMIT || batch_stride >= LIMIT) return false;
    if (batch > 1 && batch_stride > (LIMIT - 1) / (batch - 1)) return false;
    return (rows * stride + columns) * bytes < LIMIT;
}

inline bool on_vectors(const void* pointer, int64_t stride, int64_t batch_stride, int64_t vector, int64_t bytes) {
    const auto at = static_cast<int64_t>(reinterpret_cast<uintptr_t>(pointer) % 16);
    return at % (vector * bytes) == 0 && stride % vector == 0 && batch_stride % vector == 0;
}

inline int check(const GemmArgs& g, const Instance& of) {
    if (g.batch < 1 || g.m < 1 || g.n < 1 || g.k < 1) return STATUS_SIZE;
    if (g.k > LONGEST || g.batch >= LIMIT || g.m >= LIMIT / 2 || g.n >= LIMIT / 2) return STATUS_SIZE;
    if (g.k % of.k_vector || g.n % of.n_vector) return STATUS_SIZE;
    if (!g.a || !g.b || !g.e || (of.has_d && !g.d) || (of.scaled && !(g.row_scale && g.column_scale)))
        return STATUS_POINTER;
    if (g.a_stride < g.k || g.b_stride < g.k || g.e_stride < g.n) return STATUS_STRIDE;
    if (of.has_d && g.d_stride && g.d_stride < g.n) return STATUS_STRIDE;
    const int64_t m = round_up(g.m, of.rows), n = round_up(g.n, of.columns), k = round_up(g.k, of.k_tile);
    if (m / of.rows * (n / of.columns) > (LIMIT - 1) / g.batch) return STATUS_SIZE;  // blocks of the grid
    if (!within(m, k, g.a_stride, g.batch, g.a_batch_stride, 1) ||
        !within(n, k, g.b_stride, g.batch, g.b_batch_stride, 1))
        return STATUS_SIZE;
    if (!within(m, n, g.e_stride, g.batch, g.e_batch_stride, of.e_bytes)) return STATUS_SIZE;
    if (of.has_d && !within(m, n, g.d_stride, g.batch, g.d_batch_stride, of.d_bytes)) return STATUS_SIZE;
    if (!on_vectors(g.a, g.a_stride, g.a_batch_stride, of.k_vector, 1) ||
        !on_vectors(g.b, g.b_stride, g.b_batch_stride, of.k_vector, 1) ||
        !on_vectors(g.e, g.e_stride, g.e_batch_stride, of.n_vector, of.e_bytes))
        return STATUS_POINTER;
    if (of.has_d && !on_vectors(g.d, g.d_stride, g.d_batch_stride, of.n_vector, of.d_bytes)) return STATUS_POINTER;
    return STATUS_OK;
}

}  // namespace w8a8
