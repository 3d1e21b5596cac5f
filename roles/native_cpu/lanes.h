// Vectors of rows: how wide they are here, and what whole tiles need.
//
// Rows are lanes. A tile of up to 64 rows stands feature by feature, [features][64], so that a vector instruction does
// one thing for 16 (or 8, or 4) rows. A row's arithmetic has one order whatever stands beside it: its bits don't depend
// on the batch.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#if defined(__AVX512F__)
constexpr int LANES = 16, MOST = 4, BUDGET = 24;  // 32 registers: MOST x 6 sums and what they are made of
#elif defined(__AVX2__)
constexpr int LANES = 8, MOST = 2, BUDGET = 12;   // 16 registers
#else
constexpr int LANES = 4, MOST = 4, BUDGET = 24;   // NEON: 32 registers
#endif
constexpr int TILE = 64;   // rows of a tile
constexpr float NEVER = -std::numeric_limits<float>::infinity();

typedef float Vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t Bits __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef float Half __attribute__((vector_size(LANES * 2), aligned(4), may_alias));
typedef float Sixteen __attribute__((vector_size(64), aligned(4), may_alias));

namespace {

// Memory of the calling thread; what it held is lost.
float *scratch(int64_t floats) {
    static thread_local std::vector<float> memory;
    if ((int64_t)memory.size() < floats + 16) memory.resize(floats + 16);
    auto address = reinterpret_cast<uintptr_t>(memory.data());
    return reinterpret_cast<float *>((address + 63) & ~uintptr_t(63));
}

// The same number in all lanes. Subtracting 0 costs nothing; adding it would: -0 + 0 is another number.
template <class V>
inline V all(float x) {
    return x - V{};
}

// a b + c, rounded once at every width: left to itself the compiler splits some and not others, as it thinks it faster.
#if defined(__AVX512F__)
inline Vec fused(Vec a, Vec b, Vec c) { return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline Half fused(Half a, Half b, Half c) { return (Half)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
#elif defined(__FMA__) && defined(__AVX2__)
inline Vec fused(Vec a, Vec b, Vec c) { return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
inline Half fused(Half a, Half b, Half c) { return (Half)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c); }
#else
template <class V>
inline V fused(V a, V b, V c) { return a * b + c; }
#endif

// e^x to about 1 unit in the last place; 0 below the normal numbers; NaN stays NaN.
template <class V, class I>
inline V exponential(V x) {
    V low = all<V>(-87.0f);
    I tiny = x < low;
    V bounded = tiny ? low : x;
    bounded = bounded > 88.0f ? all<V>(88.0f) : bounded;
    V shift = all<V>(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    V whole = (bounded * 1.44269504088896341f + shift) - shift;
    V r = bounded - whole * 0.693359375f;
    r = r - whole * -2.12194440e-4f;
    V p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    I power = (__builtin_convertvector(whole, I) + 127) << 23;
    V result = p * (V)power;
    return tiny ? V{} : result;
}

}  // namespace
