// y[m, n] = x[m, k] @ w[n, k]^T + bias[n] for few rows m, on one thread of a CPU. Any k: 16 sums side by side, and what
// is left one by one. Sums are double, so that a result loses no more than torch's does.
#include <cstring>

namespace {

constexpr int SUMS = 16;

struct Bf16 {
    unsigned short bits;
    operator float() const {
        unsigned word = unsigned(bits) << 16;
        float value;
        std::memcpy(&value, &word, 4);
        return value;
    }
    Bf16() = default;
    explicit Bf16(float value) {  // the nearest, ties to even
        unsigned word;
        std::memcpy(&word, &value, 4);
        bits = value != value ? 0x7fc0 : (unsigned short)((word + 0x7fff + (word >> 16 & 1)) >> 16);
    }
};

template <typename T> void gemv(const T* x, const T* w, const T* bias, T* y, int m, int n, int k) {
    for (long long row = 0; row < n; ++row) {
        const T* of_row = w + row * k;
        for (long long i = 0; i < m; ++i) {
            const T* input = x + i * k;
            double sums[SUMS] = {}, sum = 0.0;
            int at = 0;
            for (; at + SUMS <= k; at += SUMS)
                for (int j = 0; j < SUMS; ++j) sums[j] += double(float(input[at + j])) * double(float(of_row[at + j]));
            for (; at < k; ++at) sum += double(float(input[at])) * double(float(of_row[at]));
            for (double part : sums) sum += part;
            y[i * n + row] = T(float(bias ? sum + float(bias[row]) : sum));
        }
    }
}

}  // namespace

extern "C" void gemv_fp32(const float* x, const float* w, const float* bias, float* y, int m, int n, int k) {
    gemv(x, w, bias, y, m, n, k);
}
extern "C" void gemv_bf16(const Bf16* x, const Bf16* w, const Bf16* bias, Bf16* y, int m, int n, int k) {
    gemv(x, w, bias, y, m, n, k);
}
extern "C" void gemv_fp16(
    const _Float16* x, const _Float16* w, const _Float16* bias, _Float16* y, int m, int n, int k) {
    gemv(x, w, bias, y, m, n, k);
}
