// Runs calls of the C interface that a text file lists, on buffers read from files: for a machine that is emulated and
// has no Python. Usage: run_calls LIBRARY LIST. Buffers are numbered; -1 is NULL.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <string>

#include "accelpatch_cpu.h"

namespace {

struct Buffer {
    char* data = nullptr;
    size_t bytes = 0;
};
std::map<int, Buffer> buffers;
std::ifstream list;
void* library;

template <typename T> T next() {
    T value;
    if (!(list >> value)) std::cerr << "the list ends within a call\n", exit(1);
    return value;
}
int64_t integer() { return next<int64_t>(); }

Buffer& made(int index, size_t bytes) {
    Buffer& b = buffers[index];
    free(b.data);
    b.data = static_cast<char*>(aligned_alloc(64, (bytes + 64) / 64 * 64));
    b.bytes = bytes;
    return b;
}
template <typename T = void> T* buffer() {
    const auto index = static_cast<int>(integer());
    return index < 0 ? nullptr : reinterpret_cast<T*>(buffers.at(index).data);
}
template <typename F> F* function(const char* name) {
    auto* found = reinterpret_cast<F*>(dlsym(library, name));
    if (!found) std::cerr << "no function " << name << "\n", exit(1);
    return found;
}
#define CALL(name) function<decltype(name)>(#name)

void load() {
    const auto index = static_cast<int>(integer());
    std::ifstream file(next<std::string>(), std::ios::binary | std::ios::ate);
    Buffer& b = made(index, static_cast<size_t>(file.tellg()));
    file.seekg(0);
    file.read(b.data, static_cast<std::streamsize>(b.bytes));
}

void save() {
    const Buffer& b = buffers.at(static_cast<int>(integer()));
    std::ofstream(next<std::string>(), std::ios::binary).write(b.data, static_cast<std::streamsize>(b.bytes));
}

ap_linear weight() {
    ap_linear w = {};
    w.kind = next<int32_t>(), w.half_scales = next<int32_t>(), w.offset = next<int32_t>();
    w.input_scale = next<float>();
    w.n = integer(), w.k = integer(), w.group = integer();
    w.data = buffer(), w.bias = buffer<float>(), w.order = buffer<int32_t>(), w.table = buffer<float>();
    return w;
}

int attention() {
    ap_attention a = {};
    a.q = buffer<float>(), a.keys = buffer<float>(), a.values = buffer<float>(), a.out = buffer<float>();
    a.slots = buffer<int64_t>(), a.starts = buffer<int64_t>();
    for (int64_t* one : {&a.batch, &a.heads, &a.kv_heads, &a.d, &a.batch_stride, &a.head_stride, &a.window})
        *one = integer();
    a.scale = next<float>(), a.softcap = next<float>();
    return CALL(ap_attention_run)(&a, 1);
}

int call(const std::string& name) {
    if (name == "load") return load(), 0;
    if (name == "save") return save(), 0;
    if (name == "isa") return CALL(ap_use_isa)(static_cast<int>(integer()));
    if (name == "attention") return attention();
    if (name == "new") {
        const auto index = static_cast<int>(integer());
        Buffer& b = made(index, static_cast<size_t>(integer()));
        for (size_t i = 0; i < b.bytes; i++) b.data[i] = '\xff';  // NaN
        return 0;
    }
    if (name == "rmsnorm") {
        const auto *x = buffer<float>(), *residual = buffer<float>(), *weight = buffer<float>();
        const auto eps = next<float>();
        const int64_t m = integer(), k = integer();
        auto *y = buffer<float>(), *sum = buffer<float>();
        return CALL(ap_rmsnorm)(x, residual, weight, eps, m, k, y, sum, 1);
    }
    if (name == "gated") {
        const auto *gate = buffer<float>(), *up = buffer<float>();
        const auto activation = static_cast<int>(integer());
        const int64_t count = integer();
        return CALL(ap_gated)(gate, up, activation, count, buffer<float>(), 1);
    }
    const ap_linear w = weight();
    if (name == "pack") {
        const void* q = buffer();
        const auto* scale = buffer<float>();
        const void* offset = buffer();
        return CALL(ap_pack)(&w, q, scale, offset, buffer());
    }
    const void* x = buffer();
    const int64_t m = integer();
    void* y = buffer();
    if (name == "panels")
        return CALL(ap_panels_run)(&w, static_cast<const float*>(x), m, w.k, static_cast<float*>(y), w.n, 2);
    const auto dtype = static_cast<int>(integer());
    return name == "linear" ? CALL(ap_linear_run)(&w, x, m, w.k, y, w.n, dtype, 2) : AP_UNSUPPORTED;
}

}  // namespace

int main(int count, char** words) {
    library = count == 3 ? dlopen(words[1], RTLD_NOW) : nullptr;
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 2;
    list.open(words[2]);
    for (std::string name; list >> name;)
        if (const int status = call(name)) return fprintf(stderr, "%s returned %d\n", name.c_str(), status), 1;
    printf("best isa: %d\n", CALL(ap_best_isa)());
    return 0;
}
