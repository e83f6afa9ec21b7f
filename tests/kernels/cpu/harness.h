// What the random shapes of harness.cpp are made of: numbers, buffers of exactly a size, weights of any kind.
#pragma once
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "accelpatch_cpu.h"

static std::mt19937 rng;
static int64_t pick(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(rng); }

template <class T>
struct Buffer {  // exactly `count` elements: `data` at a multiple of 64, `tail` wherever malloc puts them
    T *data = nullptr, *tail;
    explicit Buffer(int64_t count) : tail(static_cast<T*>(std::malloc(count * sizeof(T)))) {
        if (posix_memalign(reinterpret_cast<void**>(&data), 64, count * sizeof(T))) std::abort();
    }
    ~Buffer() { std::free(data), std::free(tail); }
    Buffer(const Buffer&) = delete;
};

static void fill(float* p, int64_t count) {
    for (int64_t i = 0; i < count; i++) p[i] = static_cast<float>(pick(-1000, 1000)) / 500;
    if (count > 0 && pick(0, 20) == 0) p[pick(0, count - 1)] = pick(0, 1) ? NAN : INFINITY;
}

static void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "%s\n", what);
    std::exit(3);
}

struct Owned {  // a weight of any kind, with its memory
    ap_linear w = {};
    std::vector<std::unique_ptr<Buffer<uint8_t>>> packs;
    std::vector<std::unique_ptr<Buffer<float>>> floats;
    std::vector<std::unique_ptr<Buffer<int32_t>>> orders;
};

static float* floats(Owned& o, int64_t count) {
    o.floats.push_back(std::make_unique<Buffer<float>>(count));
    fill(o.floats.back()->tail, count);
    return o.floats.back()->tail;
}

// A weight's group, offset and scales, of those that its kind takes with this k.
static void shape(ap_linear& w) {
    const int64_t k = w.k;
    if (w.kind == AP_TABLE && k % 16) w.kind = AP_INT4;
    if ((w.kind == AP_Q4_K || w.kind == AP_Q6_K) && k % 256) w.kind = AP_INT4;
    if (w.kind == AP_INT4 && k % 2) w.kind = AP_INT8;
    if (w.kind == AP_W8A8 && pick(0, 1)) w.input_scale = 0.01f;
    const bool grouped = w.kind == AP_INT8 || w.kind == AP_INT4 || w.kind == AP_TABLE;
    const int64_t groups[] = {16, 32, 64, k}, group = groups[pick(0, 3)];
    if (grouped && k % group == 0) w.group = group;
    if (w.kind == AP_INT4) w.offset = static_cast<int32_t>(pick(AP_NO_OFFSET, AP_ZERO_POINT));
    w.half_scales = grouped && pick(0, 1);
    if (w.kind == AP_Q4_K) w.group = 32, w.half_scales = 1;
    if (w.kind == AP_Q6_K) w.group = 16, w.half_scales = 1;
}

static void order(Owned& o) {
    o.orders.push_back(std::make_unique<Buffer<int32_t>>(o.w.k));
    int32_t* to = o.orders.back()->tail;
    for (int64_t j = 0; j < o.w.k; j++) to[j] = static_cast<int32_t>(j);
    std::shuffle(to, to + o.w.k, rng);
    o.w.order = to;
}

static int64_t canonical_bytes(const ap_linear& w) {
    if (w.kind == AP_Q4_K) return w.n * (w.k / 256) * 144;
    if (w.kind == AP_Q6_K) return w.n * (w.k / 256) * 210;
    return w.kind == AP_INT8 || w.kind == AP_W8A8 ? w.n * w.k : w.n * w.k / 2;
}

static void weight(Owned& o, int64_t n, int64_t k) {
    ap_linear& w = o.w;
    w = {static_cast<int32_t>(pick(AP_DENSE, AP_Q6_K)), 0, 0, 0, n, k, k, nullptr, nullptr, nullptr, nullptr};
    shape(w);
    if (pick(0, 1)) w.bias = floats(o, n);
    if (w.kind == AP_TABLE) w.table = floats(o, 16);
    if (w.kind != AP_W8A8 && pick(0, 2) == 0) order(o);
    if (w.kind == AP_DENSE) {
        w.data = floats(o, n * k);
        return;
    }
    const int64_t q_bytes = canonical_bytes(w), groups = n * (k / w.group), bytes = ap_pack_bytes(&w);
    require(bytes > 0, "pack_bytes");
    Buffer<uint8_t> q(q_bytes), back(q_bytes), zero(groups), zero_back(groups);
    for (int64_t i = 0; i < q_bytes; i++) q.tail[i] = static_cast<uint8_t>(pick(0, 255));
    float *scale = floats(o, groups), *minimum = floats(o, groups);
    for (int64_t i = 0; i < groups; i++) {
        scale[i] = minimum[i] = static_cast<float>(pick(1, 64)) / 64;  // float16 holds these
        zero.tail[i] = static_cast<uint8_t>(pick(0, 16));
    }
    const bool zeros = w.offset == AP_ZERO_POINT, scaled = w.kind != AP_Q4_K && w.kind != AP_Q6_K;
    o.packs.push_back(std::make_unique<Buffer<uint8_t>>(bytes));
    const void* offset = zeros ? static_cast<const void*>(zero.tail) : minimum;
    require(ap_pack(&w, q.tail, scaled ? scale : nullptr, offset, o.packs.back()->data) == AP_OK, "pack");
    Buffer<float> scale_back(groups), minimum_back(groups);
    void* to = zeros ? static_cast<void*>(zero_back.tail) : minimum_back.tail;
    require(ap_unpack(&w, o.packs.back()->data, back.tail, scaled ? scale_back.tail : nullptr, to) == AP_OK, "unpack");
    require(!std::memcmp(q.tail, back.tail, q_bytes) && (!scaled || !std::memcmp(scale, scale_back.tail, groups * 4)) &&
                (!zeros || !std::memcmp(zero.tail, zero_back.tail, groups)),
        "unpack gave something else");
    w.data = o.packs.back()->data;
}
