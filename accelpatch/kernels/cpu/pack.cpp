// From the canonical layout to the streamed one (layout.h) and back, bit for bit.
#include <cstring>

#include "superblocks.h"
#include "vec.h"

namespace {

// half: as half_scales of the weight. e4m3 is a float16 of a 256th without its last bits, which are zero.
void put_scale(uint8_t* header, int half, int64_t row, float value) {
    if (half == 2) {
        const uint16_t h = to_half(value / 256);
        header[row] = static_cast<uint8_t>((h >> 8 & 128) | (h >> 7 & 127));
    } else if (half) {
        const uint16_t h = to_half(value);
        memcpy(header + 2 * row, &h, 2);
    } else {
        memcpy(header + 4 * row, &value, 4);
    }
}

float get_scale(const uint8_t* header, int half, int64_t row) {
    if (half == 2) {
        const int byte = header[row];
        return from_half(static_cast<uint16_t>((byte & 128) << 8 | (byte & 127) << 7)) * 256;
    }
    if (half) {
        uint16_t h;
        memcpy(&h, header + 2 * row, 2);
        return from_half(h);
    }
    float f;
    memcpy(&f, header + 4 * row, 4);
    return f;
}

bool has_bytes(const ap_linear& w) { return w.kind == AP_INT8 || w.kind == AP_W8A8; }

// Code k of a row of 3 bits each, of which 8 take 3 bytes.
int three_bits(const uint8_t* q, int64_t k) {
    const uint8_t* p = q + k / 8 * 3;
    return (p[0] | p[1] << 8 | p[2] << 16) >> (k % 8 * 3) & 7;
}

void put_three_bits(uint8_t* weights, int64_t row, int64_t k, int code) {
    uint8_t* word = weights + k / 32 * 12 * kBlockRows + row * 4 + k % 4;
    uint8_t &low = word[k / 16 % 2 * 4 * kBlockRows], &upper = word[8 * kBlockRows];
    low = static_cast<uint8_t>(low | (code & 3) << (k / 4 % 4 * 2));
    upper = static_cast<uint8_t>(upper | code >> 2 << (k / 4 % 8));
}

void pack_row(const ap_linear& w, const uint8_t* q, uint8_t* weights, int64_t row) {
    for (int64_t k = 0; k < w.group; k++) {
        if (has_bytes(w)) weights[(k / 4 * kBlockRows + row) * 4 + k % 4] = static_cast<uint8_t>(q[k] ^ 0x80);
        else if (w.kind == AP_INT3) put_three_bits(weights, row, k, three_bits(q, k));
        else put_nibble(weights, row, k, k % 2 ? q[k / 2] >> 4 : q[k / 2] & 15);
    }
}

// Into a row of 3 bits each, whose bytes are set anew by the first code that begins in them.
void put_code(uint8_t* q, int64_t k, int code) {
    uint8_t* p = q + k / 8 * 3;
    if (k % 8 == 0) p[0] = p[1] = p[2] = 0;
    const int at = static_cast<int>(k % 8 * 3), all = code << at;
    for (int i = 0; i < 3; i++) p[i] = static_cast<uint8_t>(p[i] | (all >> (8 * i) & 255));
}

void unpack_row(const ap_linear& w, const uint8_t* weights, uint8_t* q, int64_t row) {
    for (int64_t k = 0; k < w.group; k++) {
        const int u = code_at(w.kind, weights, row, k);
        if (has_bytes(w)) q[k] = static_cast<uint8_t>(u ^ 0x80);
        else if (w.kind == AP_INT3) put_code(q, k, u);
        else if (k % 2 == 0) q[k / 2] = static_cast<uint8_t>(u);
        else q[k / 2] = static_cast<uint8_t>(q[k / 2] | u << 4);
    }
}

bool packable(const ap_linear* w) {
    return layout_allows(*w) && w->kind != AP_DENSE && (w->kind != AP_INT4 || w->group % 2 == 0);
}

// What goes into a pack, or comes out of it.
template <class Byte, class Float> struct Canonical {
    Byte* q;
    Float* scale;
    Byte* zero;      // where the offset is a zero point
    Float* minimum;  // where it is a minimum
};

template <class Byte, class Float, class Any>
bool take(const ap_linear& w, Byte* q, Float* scale, Any* offset, Canonical<Byte, Float>& out) {
    out = {q, scale, static_cast<Byte*>(offset), static_cast<Float*>(offset)};
    return packable(&w) && q && (has_superblocks(w) || scale) && ((w.offset == AP_NO_OFFSET && !is_nvfp4(w)) || offset);
}

}  // namespace

extern "C" int64_t ap_pack_bytes(const ap_linear* shape) {
    if (!packable(shape)) return -1;
    const Layout l = layout_of(*shape);
    return l.blocks * l.block_bytes;
}

extern "C" int ap_pack(const ap_linear* w, const void* q, const float* scale, const void* offset, void* pack) {
    Canonical<const uint8_t, const float> from;
    if (!take(*w, static_cast<const uint8_t*>(q), scale, offset, from)) return AP_BAD_ARGUMENT;
    const Layout l = layout_of(*w);
    const int64_t row_bytes = row_bytes_of(*w), each = row_bytes / l.groups;
    auto* out = static_cast<uint8_t*>(pack);
    memset(out, 0, static_cast<size_t>(l.blocks * l.block_bytes));
    for (int64_t n = 0; n < w->n; n++) {
        const int64_t row = n % kBlockRows;
        uint8_t* block = out + n / kBlockRows * l.block_bytes;
        if (has_superblocks(*w)) {
            pack_superblocks(*w, l, from.q + n * row_bytes, block, row);
            continue;
        }
        for (int64_t g = 0; g < l.groups; g++) {
            uint8_t* group = block + g * l.stride;
            const int64_t at = n * l.groups + g;
            put_scale(group, w->half_scales, row, from.scale[at]);
            if (w->offset == AP_MINIMUM) put_scale(group + l.offsets, w->half_scales, row, from.minimum[at]);
            if (w->offset == AP_ZERO_POINT) group[l.offsets + row] = from.zero[at];
            pack_row(*w, from.q + n * row_bytes + g * each, group + l.header, row);
        }
        if (!is_nvfp4(*w)) continue;
        memcpy(block + l.block_bytes - 8 * (kBlockRows - row), static_cast<const double*>(offset) + n, 8);
    }
    return AP_OK;
}

extern "C" int ap_unpack(const ap_linear* w, const void* pack, void* q, float* scale, void* offset) {
    Canonical<uint8_t, float> to;
    if (!take(*w, static_cast<uint8_t*>(q), scale, offset, to)) return AP_BAD_ARGUMENT;
    const Layout l = layout_of(*w);
    const int64_t row_bytes = row_bytes_of(*w), each = row_bytes / l.groups;
    for (int64_t n = 0; n < w->n; n++) {
        const int64_t row = n % kBlockRows;
        const uint8_t* block = static_cast<const uint8_t*>(pack) + n / kBlockRows * l.block_bytes;
        if (has_superblocks(*w)) {
            unpack_superblocks(*w, l, block, to.q + n * row_bytes, row);
            continue;
        }
        for (int64_t g = 0; g < l.groups; g++) {
            const uint8_t* group = block + g * l.stride;
            const int64_t at = n * l.groups + g;
            to.scale[at] = get_scale(group, w->half_scales, row);
            if (w->offset == AP_MINIMUM) to.minimum[at] = get_scale(group + l.offsets, w->half_scales, row);
            if (w->offset == AP_ZERO_POINT) to.zero[at] = group[l.offsets + row];
            unpack_row(*w, group + l.header, to.q + n * row_bytes + g * each, row);
        }
        if (is_nvfp4(*w)) static_cast<double*>(offset)[n] = factors_of(l, block).of[row];
    }
    return AP_OK;
}
