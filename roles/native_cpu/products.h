// Matrix products of a tile. Weights are read as they lie in the modules, [out][in], one number at a time (broadcast to
// all rows): nothing is packed, so that weights written in place are used by the next step.
#pragma once

#include "lanes.h"

namespace {

// OUTS x WIDE sums in registers over all inputs: y[o][lane] (+)= sum_i w[o][i] x[i][lane].
template <class V, int OUTS, int WIDE, bool ADD>
inline __attribute__((always_inline)) void sums(const float *w, const float *bias, const float *x, float *y, int64_t in,
                                                int64_t stride) {
    constexpr int L = sizeof(V) / 4;
    V sum[OUTS][WIDE];
    for (int o = 0; o < OUTS; o++)
        for (int v = 0; v < WIDE; v++) {
            if (ADD) sum[o][v] = *(const V *)(y + o * stride + v * L);
            else sum[o][v] = all<V>(bias ? bias[o] : 0.0f);
        }
    for (int64_t i = 0; i < in; i++) {
        __builtin_prefetch(w + OUTS * in + OUTS * i);  // the rows that come next, from a cache further out
        V read[WIDE];
        for (int v = 0; v < WIDE; v++) read[v] = *(const V *)(x + i * TILE + v * L);
        for (int o = 0; o < OUTS; o++) {
            V weight = all<V>(w[o * in + i]);
            for (int v = 0; v < WIDE; v++) sum[o][v] = fused(weight, read[v], sum[o][v]);
        }
    }
    for (int o = 0; o < OUTS; o++)
        for (int v = 0; v < WIDE; v++) *(V *)(y + o * stride + v * L) = sum[o][v];
}

template <class V, int OUTS, int WIDE, bool ADD>
void columns(const float *w, const float *bias, const float *x, float *y, int64_t in, int64_t out, int64_t stride) {
    int64_t o = 0;
    for (; o + OUTS <= out; o += OUTS)
        sums<V, OUTS, WIDE, ADD>(w + o * in, bias ? bias + o : nullptr, x, y + o * stride, in, stride);
    if constexpr (OUTS > 1)
        if (o < out)
            columns<V, OUTS / 2, WIDE, ADD>(w + o * in, bias ? bias + o : nullptr, x, y + o * stride, in, out - o,
                                            stride);
}

// y = w x, or y += w x, for the first `rows` lanes (rounded up to half a vector). `stride`: lanes of y.
template <bool ADD>
void product(const float *w, const float *bias, const float *x, float *y, int64_t in, int64_t out, int64_t rows,
             int64_t stride = TILE) {
    int64_t left = rows;
    const auto went = [&](int64_t lanes) { x += lanes, y += lanes, left -= lanes; };
    for (; left > LANES * (MOST - 1); went(LANES * MOST))
        columns<Vec, BUDGET / MOST, MOST, ADD>(w, bias, x, y, in, out, stride);
    if (MOST > 3 && left > LANES * 2) columns<Vec, 8, 3, ADD>(w, bias, x, y, in, out, stride), went(LANES * 3);
    if (MOST > 2 && left > LANES) columns<Vec, 8, 2, ADD>(w, bias, x, y, in, out, stride), went(LANES * 2);
    if (left > LANES / 2) columns<Vec, 8, 1, ADD>(w, bias, x, y, in, out, stride), went(LANES);
    if (left > 0) columns<Half, 8, 1, ADD>(w, bias, x, y, in, out, stride);
}

}  // namespace
