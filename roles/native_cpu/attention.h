// Attention of one row over its own cache. Keys stand in blocks of 16 positions, [length / 16][dim][16], so that 16
// scores are computed at once; values as [length][dim].
#pragma once

#include "lanes.h"

namespace {

constexpr int BLOCK = 16;  // positions of a block of keys

float largest(Sixteen x) {
    float m = x[0];
    for (int i = 1; i < 16; i++) m = x[i] > m ? x[i] : m;
    return m;
}

struct Head {  // the cache of one key/value head of a row
    float *keys, *values;
};

void remember(Head head, int64_t position, const float *key, const float *value, int64_t dim) {
    float *block = head.keys + position / BLOCK * BLOCK * dim + position % BLOCK;
    for (int64_t d = 0; d < dim; d++) block[d * BLOCK] = key[d];
    std::memcpy(head.values + position * dim, value, dim * sizeof(float));
}

// GROUP query heads over the first `length` positions of a head. `next`, which comes after it, is fetched meanwhile.
template <int GROUP>
void attend(const float *query, Head head, Head next, float *out, float *scores, int64_t length, int64_t dim,
            float scale) {
    typedef int32_t Whole __attribute__((vector_size(64), aligned(4), may_alias));
    const int64_t blocks = (length + BLOCK - 1) / BLOCK, stride = blocks * BLOCK;
    Sixteen most[GROUP];
    for (int g = 0; g < GROUP; g++) most[g] = all<Sixteen>(NEVER);
    const Whole lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int64_t block = 0; block < blocks; block++) {
        Sixteen even[GROUP]{}, odd[GROUP]{};
        const float *key = head.keys + block * dim * BLOCK, *ahead = next.keys + block * dim * BLOCK;
        for (int64_t d = 0; d + 1 < dim; d += 2) {
            __builtin_prefetch(ahead + d * BLOCK);
            __builtin_prefetch(ahead + (d + 1) * BLOCK);
            Sixteen k0 = *(const Sixteen *)(key + d * BLOCK), k1 = *(const Sixteen *)(key + (d + 1) * BLOCK);
            for (int g = 0; g < GROUP; g++) {
                even[g] += query[g * dim + d] * k0;
                odd[g] += query[g * dim + d + 1] * k1;
            }
        }
        const Whole beyond = lane >= (int32_t)(length - block * BLOCK);
        for (int g = 0; g < GROUP; g++) {
            Sixteen score = (even[g] + odd[g]) * scale;
            score = beyond ? all<Sixteen>(NEVER) : score;
            most[g] = score > most[g] ? score : most[g];
            *(Sixteen *)(scores + g * stride + block * BLOCK) = score;
        }
    }
    float factor[GROUP];
    for (int g = 0; g < GROUP; g++) {
        const float top = largest(most[g]);
        Sixteen sum{};
        for (int64_t t = 0; t < stride; t += BLOCK) {
            Sixteen p = exponential<Sixteen, Whole>(*(Sixteen *)(scores + g * stride + t) - top);
            *(Sixteen *)(scores + g * stride + t) = p;
            sum += p;
        }
        float total = 0;
        for (int i = 0; i < 16; i++) total += sum[i];
        factor[g] = 1.0f / total;
    }
    int64_t d = 0;
    for (; d + 32 <= dim; d += 32) {
        Sixteen low[GROUP]{}, high[GROUP]{};
        for (int64_t t = 0; t < length; t++) {
            const float *value = head.values + t * dim + d, *ahead = next.values + t * dim + d;
            __builtin_prefetch(ahead);
            __builtin_prefetch(ahead + 16);
            Sixteen v0 = *(const Sixteen *)value, v1 = *(const Sixteen *)(value + 16);
            for (int g = 0; g < GROUP; g++) {
                low[g] += scores[g * stride + t] * v0;
                high[g] += scores[g * stride + t] * v1;
            }
        }
        for (int g = 0; g < GROUP; g++) {
            *(Sixteen *)(out + g * dim + d) = low[g] * factor[g];
            *(Sixteen *)(out + g * dim + d + 16) = high[g] * factor[g];
        }
    }
    for (; d < dim; d++)
        for (int g = 0; g < GROUP; g++) {
            float sum = 0;
            for (int64_t t = 0; t < length; t++) sum += scores[g * stride + t] * head.values[t * dim + d];
            out[g * dim + d] = sum * factor[g];
        }
}

void attend_group(const float *query, Head head, Head next, float *out, float *scores, int64_t length, int64_t dim,
                  float scale, int64_t group) {
    while (group > 0) {
        const int64_t now = group >= 4 ? 4 : group;
        if (now == 4) attend<4>(query, head, next, out, scores, length, dim, scale);
        if (now == 3) attend<3>(query, head, next, out, scores, length, dim, scale);
        if (now == 2) attend<2>(query, head, next, out, scores, length, dim, scale);
        if (now == 1) attend<1>(query, head, next, out, scores, length, dim, scale);
        group -= now, query += now * dim, out += now * dim;
    }
}

}  // namespace
