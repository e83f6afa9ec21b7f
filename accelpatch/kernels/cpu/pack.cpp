// From the canonical layout to the streamed one (layout.h) and back, bit for bit.
#include <cstring>

#include "layout.h"
#include "vec.h"

namespace {

void put_scale(uint8_t* header, bool half, int64_t row, float value) {
    if (half) {
        const uint16_t h = to_half(value);
        memcpy(header + 2 * row, &h, 2);
    } else {
        memcpy(header + 4 * row, &value, 4);
    }
}

float get_scale(const uint8_t* header, bool half, int64_t row) {
    float f[kBlockRows];
    load_scales(header, half, f);
    return f[row];
}

void pack_row(const ap_linear& w, const Layout& l, const uint8_t* q, uint8_t* group, int64_t row) {
    uint8_t* weights = group + l.header;
    for (int64_t k = 0; k < w.group; k++) {
        if (w.kind != AP_INT4) {
            weights[(k / 4 * kBlockRows + row) * 4 + k % 4] = static_cast<uint8_t>(q[k] ^ 0x80);
        } else {
            const int nibble = k % 2 ? q[k / 2] >> 4 : q[k / 2] & 15;
            weights[(k / 8 * kBlockRows + row) * 4 + k % 4] |= static_cast<uint8_t>(nibble << (k / 4 % 2 * 4));
        }
    }
}

void unpack_row(const ap_linear& w, const Layout& l, const uint8_t* group, uint8_t* q, int64_t row) {
    const uint8_t* weights = group + l.header;
    for (int64_t k = 0; k < w.group; k++) {
        if (w.kind != AP_INT4) q[k] = static_cast<uint8_t>(int8_at(weights, row, k));
        else if (k % 2 == 0) q[k / 2] = static_cast<uint8_t>(int4_at(weights, row, k));
        else q[k / 2] = static_cast<uint8_t>(q[k / 2] | int4_at(weights, row, k) << 4);
    }
}

bool packable(const ap_linear* w) {
    return layout_allows(*w) && w->kind != AP_DENSE && (w->kind != AP_INT4 || w->group % 2 == 0);
}

}  // namespace

extern "C" int64_t ap_pack_bytes(const ap_linear* shape) {
    if (!packable(shape)) return -1;
    const Layout l = layout_of(*shape);
    return l.blocks * l.block_bytes;
}

extern "C" int ap_pack(const ap_linear* w, const void* q, const float* scale, const float* minimum, void* pack) {
    if (!packable(w) || (w->kind == AP_INT4 && w->minimum && !minimum)) return AP_BAD_ARGUMENT;
    const Layout l = layout_of(*w);
    const int64_t row_bytes = w->kind != AP_INT4 ? w->k : w->k / 2, group_q = row_bytes / l.groups;
    auto* out = static_cast<uint8_t*>(pack);
    memset(out, 0, static_cast<size_t>(l.blocks * l.block_bytes));
    for (int64_t n = 0; n < w->n; n++) {
        for (int64_t g = 0; g < l.groups; g++) {
            uint8_t* group = out + n / kBlockRows * l.block_bytes + g * l.group_bytes;
            const int64_t row = n % kBlockRows;
            put_scale(group, w->half_scales, row, scale[n * l.groups + g]);
            if (w->kind == AP_INT4 && w->minimum)
                put_scale(group + l.part, w->half_scales, row, minimum[n * l.groups + g]);
            pack_row(*w, l, static_cast<const uint8_t*>(q) + n * row_bytes + g * group_q, group, row);
        }
    }
    return AP_OK;
}

extern "C" int ap_unpack(const ap_linear* w, const void* pack, void* q, float* scale, float* minimum) {
    if (!packable(w)) return AP_BAD_ARGUMENT;
    const Layout l = layout_of(*w);
    const int64_t row_bytes = w->kind != AP_INT4 ? w->k : w->k / 2, group_q = row_bytes / l.groups;
    for (int64_t n = 0; n < w->n; n++) {
        for (int64_t g = 0; g < l.groups; g++) {
            const uint8_t* group =
                static_cast<const uint8_t*>(pack) + n / kBlockRows * l.block_bytes + g * l.group_bytes;
            const int64_t row = n % kBlockRows;
            scale[n * l.groups + g] = get_scale(group, w->half_scales, row);
            if (w->kind == AP_INT4 && w->minimum)
                minimum[n * l.groups + g] = get_scale(group + l.part, w->half_scales, row);
            unpack_row(*w, l, group, static_cast<uint8_t*>(q) + n * row_bytes + g * group_q, row);
        }
    }
    return AP_OK;
}
