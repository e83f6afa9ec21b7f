// y[rows, columns] = x + factor * b, y without gaps. x and b may have any strides, counted in elements: that of a
// dimension along which b is repeated is 0.
#include <cstdint>

extern "C" void scaled_add(const float* x, const float* b, float* y, int64_t rows, int64_t columns, int64_t x_row,
    int64_t x_column, int64_t b_row, int64_t b_column, float factor) {
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < columns; ++j)
            y[i * columns + j] = x[i * x_row + j * x_column] + factor * b[i * b_row + j * b_column];
}
