// Forward pass of Llama-shaped models in float32 over a slotted cache. Called by roles/decoder_cpu.py, which says
// what it promises; the structs are its `_Model`, `_Layer` and `_ROW`.
//
// A tile goes through all layers before the next one begins: its activations stay in the caches near the core, and the
// weights are streamed once a tile.

#include "attention.h"
#include "products.h"

extern "C" {

struct Layer {
    const float *input_norm, *query, *key, *value, *query_bias, *key_bias, *value_bias, *query_norm, *key_norm;
    const float *out, *post_norm, *gate, *up, *down;
};

struct Model {
    int64_t layers, hidden, heads, kv_heads, dim, inner, vocab;
    float epsilon, scale;
    const float *embed, *norm, *head, *cos, *sin;  // cos, sin: [positions][dim / 2]
    const Layer *layer;
    float *cache;  // [layers][2][slots][kv_heads][length][dim]
    int64_t slots, length;
};

struct Row {  // a token that a tile computes
    int32_t token, slot, position, out;  // out: row of the logits, or -1 where nobody asks for them
};

}  // extern "C"

namespace {

void root_mean_square(const float *weight, const float *x, float *y, int64_t size, float epsilon, int64_t rows) {
    for (int64_t at = 0; at < rows; at += LANES) {
        Vec sum{};
        for (int64_t i = 0; i < size; i++) {
            Vec value = *(const Vec *)(x + i * TILE + at);
            sum += value * value;
        }
        Vec factor;
        for (int lane = 0; lane < LANES; lane++) factor[lane] = 1.0f / std::sqrt(sum[lane] / size + epsilon);
        for (int64_t i = 0; i < size; i++)
            *(Vec *)(y + i * TILE + at) = *(const Vec *)(x + i * TILE + at) * factor * weight[i];
    }
}

// Rotate the two halves of a head against each other. cos, sin: [dim / 2][TILE], of each lane's position.
void rotate(float *x, const float *cos, const float *sin, int64_t dim, int64_t rows) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++)
        for (int64_t at = 0; at < rows; at += LANES) {
            float *low = x + i * TILE + at, *high = low + half * TILE;
            Vec a = *(Vec *)low, b = *(Vec *)high;
            Vec c = *(const Vec *)(cos + i * TILE + at), s = *(const Vec *)(sin + i * TILE + at);
            *(Vec *)low = a * c - b * s;
            *(Vec *)high = b * c + a * s;
        }
}

void gated(float *gate, const float *up, int64_t inner, int64_t rows) {
    for (int64_t i = 0; i < inner; i++)
        for (int64_t at = 0; at < rows; at += LANES) {
            Vec g = *(Vec *)(gate + i * TILE + at), u = *(const Vec *)(up + i * TILE + at);
            *(Vec *)(gate + i * TILE + at) = g / (1.0f + exponential<Vec, Bits>(-g)) * u;
        }
}

// [features][TILE] to [rows][features], and back.
void to_rows(const float *x, float *y, int64_t features, int64_t rows) {
    for (int64_t begin = 0; begin < features; begin += 16) {
        const int64_t end = begin + 16 < features ? begin + 16 : features;
        for (int64_t row = 0; row < rows; row++)
            for (int64_t i = begin; i < end; i++) y[row * features + i] = x[i * TILE + row];
    }
}

void to_lanes(const float *x, float *y, int64_t features, int64_t rows) {
    for (int64_t begin = 0; begin < features; begin += 16) {
        const int64_t end = begin + 16 < features ? begin + 16 : features;
        for (int64_t row = 0; row < rows; row++)
            for (int64_t i = begin; i < end; i++) y[i * TILE + row] = x[row * features + i];
    }
}

float *cached(const Model &m, int64_t layer, int64_t part, int64_t slot, int64_t head) {
    return m.cache + (((layer * 2 + part) * m.slots + slot) * m.kv_heads + head) * m.length * m.dim;
}

struct Buffers {
    float *hidden, *normed, *qkv, *rows, *mixed, *gate, *up, *cos, *sin, *scores;
    explicit Buffers(const Model &m) {
        const int64_t queries = m.heads * m.dim, wide = queries + 2 * m.kv_heads * m.dim, half = m.dim / 2;
        const int64_t normed_size = m.hidden > queries ? m.hidden : queries;
        int64_t sizes[] = {m.hidden * TILE, normed_size * TILE, wide * TILE, wide * TILE, queries * TILE,
                           m.inner * TILE, m.inner * TILE, half * TILE, half * TILE, 4 * (m.length + BLOCK)};
        float **parts[] = {&hidden, &normed, &qkv, &rows, &mixed, &gate, &up, &cos, &sin, &scores};
        int64_t total = 0;
        for (auto size : sizes) total += size;
        float *at = scratch(total);
        for (int i = 0; i < 10; i++) *parts[i] = at, at += sizes[i];
    }
};

void attention(const Model &m, const Layer &l, int64_t layer, const Row *row, int64_t n, Buffers &b) {
    const int64_t dim = m.dim, queries = m.heads * dim, keys = m.kv_heads * dim, wide = queries + 2 * keys;
    float *key = b.qkv + queries * TILE, *value = key + keys * TILE;
    product<false>(l.query, l.query_bias, b.normed, b.qkv, m.hidden, queries, n);
    product<false>(l.key, l.key_bias, b.normed, key, m.hidden, keys, n);
    product<false>(l.value, l.value_bias, b.normed, value, m.hidden, keys, n);
    for (int64_t head = 0; head < m.heads + m.kv_heads; head++) {
        float *x = b.qkv + head * dim * TILE;
        const float *norm = head < m.heads ? l.query_norm : l.key_norm;
        if (norm) root_mean_square(norm, x, x, dim, m.epsilon, n);
        rotate(x, b.cos, b.sin, dim, n);
    }
    to_rows(b.qkv, b.rows, wide, n);
    const int64_t group = m.heads / m.kv_heads, all = n * m.kv_heads;
    const auto place = [&](int64_t i) {
        const int64_t slot = row[i / m.kv_heads].slot, h = i % m.kv_heads;
        return Head{cached(m, layer, 0, slot, h), cached(m, layer, 1, slot, h)};
    };
    Head head = place(0);
    for (int64_t i = 0; i < all; i++) {
        const int64_t r = i / m.kv_heads, h = i % m.kv_heads, position = row[r].position;
        const float *mine = b.rows + r * wide;
        remember(head, position, mine + queries + h * dim, mine + queries + keys + h * dim, dim);
        const Head next = place(i + 1 < all ? i + 1 : i);
        attend_group(mine + h * group * dim, head, next, b.mixed + r * queries + h * group * dim, b.scores,
                     position + 1, dim, m.scale, group);
        head = next;
    }
    to_lanes(b.mixed, b.normed, queries, n);
    product<true>(l.out, nullptr, b.normed, b.hidden, queries, m.hidden, n);
}

// Up to TILE rows; those of one slot in ascending positions. `last` gets [out][hidden] of the rows that are asked for.
void tile(const Model &m, const Row *row, int64_t n, float *last) {
    Buffers b(m);
    std::memset(b.hidden, 0, m.hidden * TILE * sizeof(float));  // lanes without a row compute numbers of no account
    for (int64_t r = 0; r < n; r++) {
        for (int64_t i = 0; i < m.hidden; i++) b.hidden[i * TILE + r] = m.embed[row[r].token * m.hidden + i];
        for (int64_t i = 0; i < m.dim / 2; i++) {
            b.cos[i * TILE + r] = m.cos[row[r].position * (m.dim / 2) + i];
            b.sin[i * TILE + r] = m.sin[row[r].position * (m.dim / 2) + i];
        }
    }
    for (int64_t layer = 0; layer < m.layers; layer++) {
        const Layer &l = m.layer[layer];
        root_mean_square(l.input_norm, b.hidden, b.normed, m.hidden, m.epsilon, n);
        attention(m, l, layer, row, n, b);
        root_mean_square(l.post_norm, b.hidden, b.normed, m.hidden, m.epsilon, n);
        product<false>(l.gate, nullptr, b.normed, b.gate, m.hidden, m.inner, n);
        product<false>(l.up, nullptr, b.normed, b.up, m.hidden, m.inner, n);
        gated(b.gate, b.up, m.inner, n);
        product<true>(l.down, nullptr, b.gate, b.hidden, m.inner, m.hidden, n);
    }
    for (int64_t r = 0; r < n; r++)
        if (row[r].out >= 0)
            for (int64_t i = 0; i < m.hidden; i++) last[row[r].out * m.hidden + i] = b.hidden[i * TILE + r];
}

}  // namespace

extern "C" {

// hidden: [outs][hidden] of the rows that ask for it. Rows of one slot stand in ascending positions.
void tutti_hidden(const Model *m, const Row *row, int64_t n, float *hidden) {
    for (int64_t at = 0; at < n; at += TILE) tile(*m, row + at, n - at < TILE ? n - at : TILE, hidden);
}

// logits: [vocab][stride], a lane for each of n rows; lanes up to the next multiple of half a vector are overwritten.
void tutti_logits(const Model *m, const float *hidden, int64_t n, float *logits, int64_t stride) {
    float *x = scratch(m->hidden * TILE);
    std::memset(x, 0, m->hidden * TILE * sizeof(float));
    for (int64_t at = 0; at < n; at += TILE) {
        const int64_t rows = n - at < TILE ? n - at : TILE;
        to_lanes(hidden + at * m->hidden, x, m->hidden, rows);
        root_mean_square(m->norm, x, x, m->hidden, m->epsilon, rows);
        product<false>(m->head, nullptr, x, logits + at, m->hidden, m->vocab, rows, stride);
    }
}

// The first `length` positions of slots, copied to others.
void tutti_copy(const Model *m, const int64_t *source, const int64_t *target, int64_t n, int64_t length) {
    const int64_t floats = (length + BLOCK - 1) / BLOCK * BLOCK * m->dim;
    for (int64_t layer = 0; layer < m->layers; layer++)
        for (int part = 0; part < 2; part++)
            for (int64_t i = 0; i < n; i++)
                for (int64_t head = 0; head < m->kv_heads; head++)
                    std::memcpy(cached(*m, layer, part, target[i], head), cached(*m, layer, part, source[i], head),
                                floats * sizeof(float));
}

}  // extern "C"
