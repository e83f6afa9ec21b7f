// The C interface over the path that this machine has: checks its arguments, finds memory, hands the work to a pool.
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include "kernels.h"
#include "layout.h"

namespace {

// Asked of the processor itself: compilers' __builtin_cpu_supports needs a library that not all of them bring.
bool machine_has(int isa) {
#if defined(__x86_64__)
    unsigned a = 0, b = 0, c = 0, d = 0, saved = 0, upper = 0;
    if (isa == AP_ISA_PORTABLE) return true;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return false;
    constexpr unsigned fma = 1u << 12, xgetbv = 1u << 27, f16c = 1u << 29;
    if (~c & (fma | xgetbv | f16c)) return false;
    __asm__("xgetbv" : "=a"(saved), "=d"(upper) : "c"(0));  // the registers that the system saves
    constexpr unsigned ymm = 0x6, zmm = 0xe6;
    if (~saved & ymm || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    constexpr unsigned avx2 = 1u << 5, f_dq_bw_vl = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31, vnni = 1u << 11;
    if (isa == AP_ISA_AVX2) return b & avx2;
    if (isa == AP_ISA_AVX512) return !(~b & (avx2 | f_dq_bw_vl)) && (c & vnni) && !(~saved & zmm);
#elif defined(__aarch64__)
    if (isa == AP_ISA_DOTPROD) return getauxval(AT_HWCAP) & 1u << 20;  // HWCAP_ASIMDDP
#endif
    return isa == AP_ISA_PORTABLE;
}

int best() {
    for (int isa = AP_ISA_DOTPROD; isa > AP_ISA_PORTABLE; isa--)
        if (machine_has(isa)) return isa;
    return AP_ISA_PORTABLE;
}

std::atomic<int> chosen{-1};

}  // namespace

const Kernels& chosen_kernels() {
#if defined(__x86_64__)
    switch (ap_isa()) {
        case AP_ISA_AVX512: return *avx512_kernels();
        case AP_ISA_AVX2: return *avx2_kernels();
    }
#elif defined(__aarch64__)
    if (ap_isa() == AP_ISA_DOTPROD) return *dotprod_kernels();
#endif
    return *portable_kernels();
}

namespace {

// Each calling thread's memory for products outside a step: it grows to what was last the most, and is freed with the
// thread.
struct Memory {
    void* data = nullptr;
    size_t bytes = 0;
    ~Memory() { free(data); }
    void* at_least(int64_t want) {
        const auto need = static_cast<size_t>(want);
        if (need > bytes) {
            free(data);
            data = aligned_alloc(64, (need + 63) / 64 * 64);
            bytes = data ? need : 0;
        }
        return data;
    }
};
thread_local Memory memory;

constexpr int64_t kTokens =
    4096;  // that a panel meets before it is made anew: what a thread keeps for them stays small

// Columns of a gradient that a thread computes at a time: as many as its rows of the weight stay in a core's cache.
constexpr int64_t kColumns = 1024;

// A thread for each piece of work that is worth waking one for.
int useful(int threads, int64_t bytes) { return bytes < 32768 ? 1 : threads; }

constexpr int64_t kW8A8Tokens = 1024;  // that are int8 rows at a time

int w8a8_run(
    const ap_linear& w, const void* x, int64_t m, int64_t x_stride, void* y, int64_t y_stride, int dtype, int threads) {
    const int64_t most = m < kW8A8Tokens ? m : kW8A8Tokens, bytes = dtype == AP_FLOAT32 ? 4 : 2;
    const int64_t rows = dtype == AP_FLOAT32 ? 0 : round_up(threads * w.k * 4, 64);
    auto* room = static_cast<char*>(memory.at_least(rows + chosen_kernels().activation_bytes(most, w.k, false)));
    if (!room) return AP_NO_MEMORY;
    threads = useful(threads, w.n * w.k * m);
    for (int64_t t = 0; t < m; t += kW8A8Tokens) {
        LinearCall call = {&w, static_cast<const char*>(x) + t * x_stride * bytes,
            static_cast<char*>(y) + t * y_stride * bytes, m - t < kW8A8Tokens ? m - t : kW8A8Tokens, x_stride, y_stride,
            dtype, reinterpret_cast<float*>(room), room + rows};
        pool_run(threads, chosen_kernels().w8a8, &call, POOL_GUEST);
    }
    return AP_OK;
}

}  // namespace

extern "C" {

int ap_best_isa(void) { return best(); }

int ap_use_isa(int isa) {
    if (isa < 0) isa = best();
    if (!machine_has(isa)) return AP_UNSUPPORTED;
    chosen.store(isa);
    return AP_OK;
}

int ap_isa(void) {
    int isa = chosen.load(std::memory_order_relaxed);
    if (isa < 0) chosen.store(isa = best());
    return isa;
}

int ap_linear_run(
    const ap_linear* w, const void* x, int64_t m, int64_t x_stride, void* y, int64_t y_stride, int dtype, int threads) {
    if (!w || !readable(*w) || m < 0 || dtype < AP_FLOAT32 || dtype > AP_FLOAT16) return AP_BAD_ARGUMENT;
    if (m == 0) return AP_OK;
    if (!x || !y || (m > 1 && (x_stride < w->k || y_stride < w->n))) return AP_BAD_ARGUMENT;
    if (w->kind == AP_W8A8) return w8a8_run(*w, x, m, x_stride, y, y_stride, dtype, threads < 1 ? 1 : threads);
    const int64_t rows = dtype == AP_FLOAT32 ? 0 : round_up(m * w->k * 4, 64);
    auto* bytes = static_cast<char*>(memory.at_least(rows + chosen_kernels().activation_bytes(m, w->k, w->order)));
    if (!bytes) return AP_NO_MEMORY;
    LinearCall call = {w, x, y, m, x_stride, y_stride, dtype, reinterpret_cast<float*>(bytes), bytes + rows};
    pool_run(useful(threads, w->n * w->k * m), chosen_kernels().linear, &call, POOL_GUEST);
    return AP_OK;
}

int ap_gather(const ap_linear* w, const int64_t* ids, int64_t count, float* rows) {
    if (!w || !readable(*w) || count < 0) return AP_BAD_ARGUMENT;
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= w->n) return AP_BAD_ARGUMENT;
    chosen_kernels().gather(w, ids, count, rows);
    return AP_OK;
}

int ap_panels_run(
    const ap_linear* w, const float* x, int64_t m, int64_t x_stride, float* y, int64_t y_stride, int threads) {
    if (!w || !readable(*w) || w->kind == AP_DENSE || w->kind == AP_W8A8 || m < 0) return AP_BAD_ARGUMENT;
    if (m == 0) return AP_OK;
    if (!x || !y || (m > 1 && (x_stride < w->k || y_stride < w->n))) return AP_BAD_ARGUMENT;
    threads = useful(threads < 1 ? 1 : threads, w->n * w->k * m);
    const int64_t most = m < kTokens ? m : kTokens;
    const int64_t panels = threads * chosen_kernels().panel_floats(most), ordered = w->order ? most * w->k : 0;
    auto* room = static_cast<float*>(memory.at_least((panels + ordered) * 4));
    if (!room) return AP_NO_MEMORY;
    for (int64_t t = 0; t < m; t += kTokens) {
        PanelsCall call = {w, x + t * x_stride, m - t < kTokens ? m - t : kTokens, x_stride, y + t * y_stride, y_stride,
            room, room + panels};
        pool_run(threads, chosen_kernels().panels, &call, POOL_GUEST);
    }
    return AP_OK;
}

int ap_gradient_run(
    const ap_linear* w, const float* dy, int64_t m, int64_t dy_stride, float* dx, int64_t dx_stride, int threads) {
    if (!w || !readable(*w) || w->kind == AP_DENSE || w->kind == AP_W8A8 || m < 0) return AP_BAD_ARGUMENT;
    if (m == 0) return AP_OK;
    if (!dy || !dx || dx_stride % AP_COLUMNS || dx_stride < w->k || (m > 1 && dy_stride < w->n)) return AP_BAD_ARGUMENT;
    threads = useful(threads < 1 ? 1 : threads, w->n * w->k * m);
    const int64_t each = round_up((w->k + threads - 1) / threads, AP_COLUMNS);
    const int64_t columns = each < kColumns ? each : kColumns;
    auto* room = static_cast<float*>(memory.at_least(threads * chosen_kernels().gradient_floats(columns) * 4));
    if (!room) return AP_NO_MEMORY;
    GradientCall call = {w, dy, m, dy_stride, dx, dx_stride, columns, room};
    pool_run(threads, chosen_kernels().gradient, &call, POOL_GUEST);
    return AP_OK;
}

static int run_stored(const ap_stored* w, const StoredCall& given, int threads) {
    if (!w || w->form < AP_STORED_Q8_0 || w->form > AP_STORED_E4M3 || w->n < 1 || w->k < 1 || !w->data)
        return AP_BAD_ARGUMENT;
    const bool e4m3 = w->form == AP_STORED_E4M3, of_32 = w->k % 32 == 0 && w->form <= AP_STORED_Q5_1;
    if (!e4m3 && !of_32 && w->k % (w->form == AP_STORED_IQ4_NL ? 32 : kSuperblock)) return AP_BAD_ARGUMENT;
    if (e4m3 && (!w->scale || (w->scales != 1 && w->scales != (w->k + 127) / 128))) return AP_BAD_ARGUMENT;
    StoredCall call = given;
    pool_run(useful(threads < 1 ? 1 : threads, w->n * w->k), chosen_kernels().stored, &call, POOL_GUEST);
    return AP_OK;
}

int ap_stored_run(
    const ap_stored* w, const float* x, int64_t m, int64_t x_stride, float* y, int64_t y_stride, int threads) {
    if (!w || m < 0 || m > AP_MAX_STORED) return AP_BAD_ARGUMENT;
    if (m == 0) return AP_OK;
    if (!x || !y || (m > 1 && (x_stride < w->k || y_stride < w->n))) return AP_BAD_ARGUMENT;
    return run_stored(w, {w, x, m, x_stride, y, y_stride}, threads);
}

int ap_stored_values(const ap_stored* w, float* values, int threads) {
    return values ? run_stored(w, {w, nullptr, 0, 0, values, 0}, threads) : AP_BAD_ARGUMENT;
}

int ap_rmsnorm(const float* x, const float* residual, const float* weight, float eps, int64_t m, int64_t k, float* y,
    float* sum, int threads) {
    if (!weight || m < 0 || k < 1 || (m > 0 && (!x || !y || (residual && !sum)))) return AP_BAD_ARGUMENT;
    NormCall call = {x, residual, weight, y, sum, m, k, eps};
    if (m > 0) pool_run(useful(threads, m * k * 4), chosen_kernels().norm, &call, POOL_GUEST);
    return AP_OK;
}

int ap_rope_(float* x, const float* cos, const float* sin, int64_t m, int64_t heads, int64_t d) {
    if (m < 0 || heads < 0 || d < 2 || d % 2 || !cos || !sin) return AP_BAD_ARGUMENT;
    chosen_kernels().rope(x, cos, sin, m, heads, d);
    return AP_OK;
}

int ap_gated(const float* gate, const float* up, int activation, int64_t count, float* y, int threads) {
    if (activation < AP_SILU || activation > AP_RELU || count < 0) return AP_BAD_ARGUMENT;
    GatedCall call = {gate, up, y, count, activation};
    if (count > 0) pool_run(useful(threads, count * 4), chosen_kernels().gated, &call, POOL_GUEST);
    return AP_OK;
}

int64_t ap_argmax(const float* x, int64_t count) {
    int64_t at = 0;
    for (int64_t i = 0; i < count; i++) {
        if (x[i] != x[i]) return i;
        if (x[i] > x[at]) at = i;
    }
    return at;
}

int ap_attention_run(const ap_attention* a, int threads) {
    if (!a || a->batch < 1 || a->kv_heads < 1 || a->heads < 1 || a->heads % a->kv_heads || a->d < 1)
        return AP_BAD_ARGUMENT;
    int64_t runs = 1;
    for (int64_t b = 0; b < a->batch; b++) {
        if (a->starts[b] < 0 || a->slots[b] < a->starts[b]) return AP_BAD_ARGUMENT;
        const int64_t window = a->window > 0 ? a->window : a->slots[b] + 1;
        const int64_t count = a->slots[b] - a->starts[b] + 1 < window ? a->slots[b] - a->starts[b] + 1 : window;
        runs = (count + 63) / 64 > runs ? (count + 63) / 64 : runs;
    }
    AttentionCall call = {
        *a, runs, static_cast<float*>(memory.at_least(a->batch * a->heads * runs * round_up(a->d + 2, 16) * 4))};
    if (!call.partial) return AP_NO_MEMORY;
    pool_run(useful(threads, a->batch * a->heads * runs * 64 * a->d), chosen_kernels().attention, &call, POOL_GUEST);
    return AP_OK;
}

int ap_pages_run(const ap_pages* a, int threads) {
    if (!a || a->batch < 1 || a->kv_heads < 1 || a->heads < 1 || a->heads % a->kv_heads || a->d < 1)
        return AP_BAD_ARGUMENT;
    int64_t runs = 1, total = 0;
    for (int64_t b = 0; b < a->batch; b++) {
        if (a->starts[b] < 0 || a->ends[b] <= a->starts[b]) return AP_BAD_ARGUMENT;
        for (int64_t i = a->starts[b]; i < a->ends[b]; i++)
            if (a->index[i] < 0 || a->index[i] >= a->tokens) return AP_BAD_ARGUMENT;
        const int64_t count = a->ends[b] - a->starts[b];
        runs = (count + 63) / 64 > runs ? (count + 63) / 64 : runs;
        total += count;
    }
    threads = useful(threads < 1 ? 1 : threads, total * a->heads * a->d);
    const int64_t partial = a->batch * a->heads * runs * round_up(a->d + 2, 16);
    const int64_t own = 2 * 64 * a->d + a->heads / a->kv_heads * round_up(a->d + 2, 16);
    auto* room = static_cast<float*>(memory.at_least((partial + threads * own) * 4));
    if (!room) return AP_NO_MEMORY;
    PagesCall call = {*a, runs, room, room + partial};
    pool_run(threads, chosen_kernels().pages, &call, POOL_GUEST);
    return AP_OK;
}

}  // extern "C"
