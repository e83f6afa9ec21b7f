// Stands for Composable Kernel on a CPU: the products by loops; the checks and the element operation are those of the
// device library.
#include "epilogue.h"
#include "instances.h"

using namespace w8a8;

template <class I> void element(const Epilogue& epilogue, const GemmArgs& g, int64_t batch, int64_t m, int64_t n) {
    using E = typename I::E;
    const auto* a = static_cast<const int8_t*>(g.a) + batch * g.a_batch_stride + m * g.a_stride;
    const auto* b = static_cast<const int8_t*>(g.b) + batch * g.b_batch_stride + n * g.b_stride;
    const auto* d = static_cast<const E*>(g.d) + batch * g.d_batch_stride + m * g.d_stride + n;
    const auto* row = static_cast<const float*>(g.row_scale) + m;
    const auto* column = static_cast<const float*>(g.column_scale) + n;
    E& e = static_cast<E*>(g.e)[batch * g.e_batch_stride + m * g.e_stride + n];
    int32_t c = 0;
    for (int64_t k = 0; k < g.k; ++k) c += int32_t(a[k]) * b[k];
    if constexpr (I::scaled && I::has_d) epilogue(e, c, *row, *column, *d);
    else if constexpr (I::scaled) epilogue(e, c, *row, *column);
    else if constexpr (I::has_d) epilogue(e, c, *d);
    else epilogue(e, c);
}

template <class I> int launch(const GemmArgs& g, bool dry) {
    if (const int bad = check(g, I::limits)) return bad;
    if (dry) return STATUS_OK;
    const Epilogue epilogue{g.alpha, g.beta, g.relu != 0};
    for (int64_t batch = 0; batch < g.batch; ++batch)
        for (int64_t m = 0; m < g.m; ++m)
            for (int64_t n = 0; n < g.n; ++n) element<I>(epilogue, g, batch, m, n);
    return STATUS_OK;
}

template <int FORM, int OUTPUT> int by_tile(int tile, const GemmArgs& g, bool dry) {
    if (tile == 0) return launch<InstanceOf<FORM, OUTPUT, 0>>(g, dry);
    if (tile == 1) return launch<InstanceOf<FORM, OUTPUT, 1>>(g, dry);
    return tile == 2 ? launch<InstanceOf<FORM, OUTPUT, 2>>(g, dry) : launch<InstanceOf<FORM, OUTPUT, 3>>(g, dry);
}

template <int FORM> int by_output(int output, int tile, const GemmArgs& g, bool dry) {
    if (output == 0) return by_tile<FORM, 0>(tile, g, dry);
    if (output == 1) return by_tile<FORM, 1>(tile, g, dry);
    return output == 2 ? by_tile<FORM, 2>(tile, g, dry) : by_tile<FORM, 3>(tile, g, dry);
}

// dry: check the arguments alone.
extern "C" int emulated(int form, int output, int tile, const GemmArgs* g, int dry) {
    if (form == 0) return by_output<0>(output, tile, *g, dry);
    if (form == 1) return by_output<1>(output, tile, *g, dry);
    return form == 2 ? by_output<2>(output, tile, *g, dry) : by_output<3>(output, tile, *g, dry);
}

// The element operation alone, of n values: int8 from int8 D.
extern "C" void finish(const int32_t* c, const int8_t* d, float alpha, float beta, int relu, int64_t n, int8_t* e) {
    const Epilogue epilogue{alpha, beta, relu != 0};
    for (int64_t i = 0; i < n; ++i) d ? epilogue(e[i], c[i], d[i]) : epilogue(e[i], c[i]);
}

// A value rounded to each of the 16-bit outputs.
extern "C" void stored(const float* y, int64_t n, uint16_t* bf16, _Float16* fp16) {
    for (int64_t i = 0; i < n; ++i) store(bf16[i], y[i]), store(fp16[i], y[i]);
}
