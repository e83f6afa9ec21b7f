// Random shapes through every function of the C interface, for a build under sanitizers. Each buffer has exactly the
// size that the interface asks for, so that a byte too far is an error. argv: seed, rounds, ISA. Prints how many rounds
// it did.
#include "harness.h"

static void products() {
    Owned o;
    weight(o, pick(1, 70), pick(0, 1) ? 16 * pick(1, 80) : pick(0, 1) ? 256 * pick(1, 4) : pick(1, 1100));
    const int64_t m = pick(0, 60), x_stride = o.w.k + pick(0, 3), y_stride = o.w.n + pick(0, 3), dtype = pick(0, 2);
    const int64_t bytes = dtype ? 2 : 4, x_count = m ? (m - 1) * x_stride + o.w.k : 0,
                  y_count = m ? (m - 1) * y_stride + o.w.n : 0;
    Buffer<uint8_t> x(x_count * bytes), y(y_count * bytes);
    for (int64_t i = 0; i < x_count * bytes; i++) x.tail[i] = static_cast<uint8_t>(pick(0, 255));
    if (!dtype) fill(reinterpret_cast<float*>(x.tail), x_count);
    require(ap_linear_run(&o.w, x.tail, m, x_stride, y.tail, y_stride, static_cast<int>(dtype),
                static_cast<int>(pick(1, 3))) == AP_OK,
        "linear");
    int64_t ids[2] = {pick(0, o.w.n - 1), pick(0, o.w.n - 1)};
    Buffer<float> rows(2 * o.w.k);
    require(ap_gather(&o.w, ids, 2, rows.tail) == AP_OK, "gather");
    if (dtype || o.w.kind == AP_DENSE || o.w.kind == AP_W8A8) return;
    Buffer<float> wide(y_count);
    const auto* from = reinterpret_cast<const float*>(x.tail);
    require(
        ap_panels_run(&o.w, from, m, x_stride, wide.tail, y_stride, static_cast<int>(pick(1, 3))) == AP_OK, "panels");
    const int64_t dx_stride = (o.w.k + AP_COLUMNS - 1) / AP_COLUMNS * AP_COLUMNS;
    require(ap_gradient_run(&o.w, wide.tail, m, y_stride, floats(o, m * dx_stride), dx_stride,
                static_cast<int>(pick(1, 3))) == AP_OK,
        "gradient");
}

// A weight as a checkpoint stores it, in exactly its bytes.
static void stored() {
    const int64_t bytes[] = {34, 18, 20, 22, 24, 84, 110, 176, 18, 136, 144, 210};
    const auto form = static_cast<int32_t>(pick(AP_STORED_Q8_0, AP_STORED_E4M3));
    const bool e4m3 = form == AP_STORED_E4M3, small = form <= AP_STORED_Q5_1 || form == AP_STORED_IQ4_NL;
    const int64_t n = pick(1, 40), blocks = pick(1, 5), k = e4m3 ? pick(1, 700) : blocks * (small ? 32 : 256);
    const int64_t m = pick(0, 64), size = n * (e4m3 ? k : blocks * bytes[form]);
    Owned o;
    Buffer<uint8_t> data(size);
    for (int64_t i = 0; i < size; i++) data.tail[i] = static_cast<uint8_t>(pick(0, 255));
    const int64_t scales = pick(0, 1) ? 1 : (k + 127) / 128;
    const ap_stored w = {
        form, 0, n, k, scales, data.tail, e4m3 ? floats(o, n * scales) : nullptr, pick(0, 1) ? floats(o, n) : nullptr};
    const int threads = static_cast<int>(pick(1, 3));
    require(ap_stored_run(&w, floats(o, m * k), m, k, floats(o, m * n), n, threads) == AP_OK, "stored_run");
    require(ap_stored_values(&w, floats(o, n * k), threads) == AP_OK, "stored_values");
}

static void rows() {
    const int64_t m = pick(0, 5), k = pick(1, 200), half = pick(1, 40), heads = pick(1, 4);
    Owned o;
    float *x = floats(o, m * k), *residual = pick(0, 1) ? floats(o, m * k) : nullptr, *w = floats(o, k);
    require(ap_rmsnorm(x, residual, w, 1e-5f, m, k, floats(o, m * k), floats(o, m * k), 2) == AP_OK, "rmsnorm");
    require(ap_gated(x, floats(o, m * k), static_cast<int>(pick(0, 3)), m * k, floats(o, m * k), 2) == AP_OK, "gated");
    float *cos = floats(o, m * half), *sin = floats(o, m * half);
    require(ap_rope_(floats(o, m * heads * 2 * half), cos, sin, m, heads, 2 * half) == AP_OK, "rope");
    const int64_t at = ap_argmax(w, k);
    require(at >= 0 && at < k, "argmax");
}

static void attention() {
    const int64_t batch = pick(1, 4), kv_heads = pick(1, 3), heads = kv_heads * pick(1, 4), d = pick(1, 80),
                  length = pick(1, 200);
    Owned o;
    int64_t slots[4], starts[4];
    for (int64_t b = 0; b < batch; b++) slots[b] = pick(0, length - 1), starts[b] = pick(0, slots[b]);
    const int64_t cache = batch * kv_heads * length * d;
    ap_attention a = {floats(o, batch * heads * d), floats(o, cache), floats(o, cache), floats(o, batch * heads * d),
        slots, starts, batch, heads, kv_heads, d, kv_heads * length * d, length * d, pick(0, 1) ? pick(1, 100) : 0,
        0.1f, pick(0, 1) ? 30.0f : 0.0f, pick(0, 1) ? floats(o, heads) : nullptr};
    require(ap_attention_run(&a, 2) == AP_OK, "attention");
}

static void pages() {
    const int64_t batch = pick(1, 4), kv_heads = pick(1, 3), heads = kv_heads * pick(1, 4), d = pick(1, 70),
                  tokens = pick(1, 200);
    Owned o;
    int64_t index[400], starts[4], ends[4];
    for (int64_t& one : index) one = pick(0, tokens - 1);
    for (int64_t b = 0; b < batch; b++) {  // rows of a prompt begin at one place
        starts[b] = b && pick(0, 1) ? starts[b - 1] : pick(0, 398), ends[b] = pick(starts[b] + 1, 400);
    }
    ap_pages a = {floats(o, batch * heads * d), floats(o, tokens * kv_heads * d), floats(o, tokens * kv_heads * d),
        floats(o, batch * heads * d), index, starts, ends, batch, heads, kv_heads, d, tokens, 0.1f,
        pick(0, 1) ? 30.0f : 0.0f, pick(0, 1) ? floats(o, heads) : nullptr};
    require(ap_pages_run(&a, 2) == AP_OK, "pages");
}

// Experts of one size one after the other, in one buffer of exactly their bytes: the first one's weight, and the bytes
// from one to the next.
static int64_t stack(Owned& o, int64_t n, int64_t k, int64_t number, bool dense) {
    weight(o, n, k);
    while ((o.w.kind == AP_DENSE) != dense || o.w.order || o.w.kind == AP_W8A8) weight(o, n, k);
    o.w.bias = pick(0, 1) ? floats(o, number * 2 * n) : nullptr;  // twice: rows of gate and of up
    const int64_t bytes = dense ? n * k * 4 : ap_pack_bytes(&o.w);
    o.packs.push_back(std::make_unique<Buffer<uint8_t>>(number * bytes));
    for (int64_t e = 0; e < number; e++) std::memcpy(o.packs.back()->data + e * bytes, o.w.data, bytes);
    o.w.data = o.packs.back()->data;
    return bytes;
}

// Perhaps an RMSNorm.
static ap_norm rms(Owned& o, int64_t n) { return {pick(0, 1) ? floats(o, n) : nullptr, nullptr, 1e-5f, 0}; }
// Or a LayerNorm.
static ap_norm norm(Owned& o, int64_t n) {
    if (pick(0, 1)) return rms(o, n);
    return {floats(o, n), pick(0, 1) ? floats(o, n) : nullptr, 1e-5f, 1};
}

struct Texts {  // an encoder's: that of each row, and where each ends
    int64_t of_row[8], ends[3];
};

static ap_encoded encoder(Owned& o, Texts& its, int64_t rows) {
    ap_encoded made = {pick(1, std::min<int64_t>(rows, 3)), pick(1, 90), its.of_row, its.ends, nullptr};
    for (int64_t& one : its.of_row) one = pick(0, made.texts - 1);
    for (int64_t& one : its.ends) one = pick(1, made.length);
    if (pick(0, 1)) made.mask = floats(o, made.texts * made.length);
    return made;
}

// Three steps of a model, each in one call and cut behind its embedding.
static void run(void* step, int64_t most, int64_t length, int64_t words, int64_t hidden, bool one) {
    for (int i = 0; i < 3; i++) {
        const int64_t batch = pick(1, most < length ? most : length), first = pick(0, length - batch);
        int64_t tokens[8], slots[8], starts[8], positions[8];
        for (int64_t b = 0; b < batch; b++)
            tokens[b] = pick(0, words - 1), slots[b] = one ? first + b : pick(0, length - 1),
            starts[b] = one ? 0 : pick(0, slots[b]), positions[b] = slots[b];
        Buffer<float> logits(batch * words);
        const int threads = static_cast<int>(pick(1, 3));
        require(
            ap_step_run(step, batch, tokens, slots, starts, positions, 0, 1, nullptr, logits.tail, threads) == AP_OK,
            "step_run");
        Buffer<float> stream(batch * hidden);
        require(ap_step_run(step, batch, tokens, slots, starts, positions, 0, 0, stream.tail, logits.tail, threads) ==
                    AP_OK,
            "step_run_embed");
        require(ap_step_run(step, batch, tokens, slots, starts, positions, 1, 1, stream.tail, logits.tail, threads) ==
                    AP_OK,
            "step_run_head");
    }
}

static void steps() {
    const int64_t hidden = pick(1, 4) * 16 + 2 * pick(0, 3), kv_heads = pick(1, 2), heads = kv_heads * pick(1, 3),
                  d = 2 * pick(1, 20);
    const int64_t wide = pick(2, 90), words = pick(5, 60), length = pick(2, 150), most = pick(1, 8), q = heads * d,
                  kv = kv_heads * d;
    Owned own[11], o;
    const int64_t shapes[11][2] = {{q, hidden}, {kv, hidden}, {kv, hidden}, {hidden, q}, {wide, hidden}, {wide, hidden},
        {hidden, wide}, {words, hidden}, {words, hidden}, {q, hidden}, {hidden, q}};
    for (int i = 0; i < 11; i++) weight(own[i], shapes[i][0], shapes[i][1]);
    const bool one = pick(0, 1);  // the tokens of a step are of one sequence
    const int64_t form = pick(0, 3), rows = (one ? 1 : most) * kv_heads * length;
    const int64_t cache = (rows * d * (form == AP_CACHE_FLOAT ? 4 : form == AP_CACHE_BF16 ? 2 : 1) + 3) / 4;
    auto scales = [&] {
        return form > AP_CACHE_BF16 ? reinterpret_cast<uint16_t*>(floats(o, (rows + 1) / 2)) : nullptr;
    };
    ap_layer layer = {};
    layer.q = own[0].w, layer.k = own[1].w, layer.v = own[2].w, layer.o = own[3].w;
    layer.gate = own[4].w, layer.up = own[5].w, layer.down = own[6].w;
    layer.attention_norm = norm(o, hidden), layer.after_attention_norm = norm(o, hidden);
    layer.mlp_norm = norm(o, hidden), layer.after_mlp_norm = norm(o, hidden);
    layer.q_norm = rms(o, d), layer.k_norm = rms(o, d);
    layer.keys = floats(o, cache), layer.values = floats(o, cache);
    layer.key_scales = scales(), layer.value_scales = scales(), layer.attention_scale = 0.2f;
    layer.window = pick(0, 1) ? pick(1, 99) : 0;
    layer.rope = static_cast<int32_t>(pick(-1, 0)), layer.activation = static_cast<int32_t>(pick(0, 3));
    layer.cache = static_cast<int32_t>(form);
    if (pick(0, 1)) layer.sinks = floats(o, heads);
    Owned router, gate, up, down;
    if (pick(0, 1)) {
        const int64_t number = pick(1, 6);
        const bool dense = pick(0, 1);
        layer.router = {AP_DENSE, 0, 0, 0, number, hidden, hidden, floats(router, number * hidden),
            pick(0, 1) ? floats(router, number) : nullptr, nullptr, nullptr};
        layer.expert_bytes = stack(gate, wide, hidden, number, dense);
        up.w = gate.w, layer.gate = gate.w, layer.up = up.w;
        layer.down_bytes = stack(down, hidden, wide, number, pick(0, 1));
        layer.down = down.w, layer.chosen = pick(1, number), layer.normalise = static_cast<int32_t>(pick(0, 1));
        layer.activation = static_cast<int32_t>(pick(0, 4)), layer.alpha = 1.7f, layer.limit = 1.0f;
    } else if (pick(0, 1)) {  // of an encoder-decoder, where anything of it may be there
        layer.post = static_cast<int32_t>(pick(0, 1));
        if (pick(0, 1)) layer.up = {};
    }
    Texts texts;
    ap_encoded encoded = {};
    if (pick(0, 1)) {
        encoded = encoder(o, texts, most);
        layer.cross_q = own[9].w, layer.cross_o = own[10].w, layer.cross_norm = norm(o, hidden);
        layer.cross_scale = 0.3f;
        layer.cross_keys = floats(o, encoded.texts * heads * encoded.length * d);
        layer.cross_values = floats(o, encoded.texts * heads * encoded.length * d);
    }
    ap_model model = {1, hidden, d, most, length, &layer, own[7].w, own[8].w, rms(o, hidden),
        {floats(o, d / 2), nullptr}, {1, 1}, 2, pick(0, 1) ? 9.0f : 0.0f, one, 0};
    if (pick(0, 1)) model.position_rows = length, model.positions = floats(o, length * hidden);
    if (pick(0, 1)) model.embedding_norm = norm(o, hidden);
    if (pick(0, 1)) model.biased_heads = heads, model.score_bias = floats(o, heads * length);
    model.encoded = encoded;
    void* step = nullptr;
    require(ap_step_create(&model, 4, &step) == AP_OK, "step_create");
    run(step, most, length, words, hidden, one);
    ap_step_free(step);
}

int main(int, char** argv) {
    rng.seed(static_cast<unsigned>(std::atoi(argv[1])));
    const int rounds = std::atoi(argv[2]);
    require(ap_use_isa(std::atoi(argv[3])) == AP_OK, "use_isa");
    for (int i = 0; i < rounds; i++) {
        products();
        stored();
        rows();
        attention();
        pages();
        steps();
    }
    std::printf("%d\n", rounds);
}
