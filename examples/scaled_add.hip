// As scaled_add.cpp: each thread computes one element. Grid [ceil(rows * columns / 256)], block [256].
#if defined(__HIP__)
#include <hip/hip_runtime.h>
#endif
#include <stdint.h>

extern "C" __global__ void scaled_add(const float* x, const float* b, float* y, int64_t rows, int64_t columns,
    int64_t x_row, int64_t x_column, int64_t b_row, int64_t b_column, float factor) {
    const int64_t at = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= rows * columns) return;
    const int64_t i = at / columns, j = at % columns;
    y[at] = x[i * x_row + j * x_column] + factor * b[i * b_row + j * b_column];
}
