// Tokens out of logits, as roles/sampling.py promises (SA-1 to SA-3), for rows without top-k and top-p. Called by
// roles/rows_cpu.py, which says what the struct holds.

#include "lanes.h"

extern "C" {

struct Rows {  // state of the running rows; roles/rows.py says what it means
    int64_t *ints;  // [rows][6]: token, length, count, limit, seed, first
    const float *temperature;
    const int64_t *stops;  // [rows][num_stops]
    int64_t num_stops;
    int32_t *output;  // [rows][most][3]: token, bits of the logprob, version
    int64_t most;
};

}  // extern "C"

namespace {

uint64_t mix(uint64_t bits) {
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
    return bits ^ (bits >> 31);
}

// roles.sampling.uniforms
double uniform(uint64_t seed, uint64_t index) {
    return (double)(mix(mix(seed) + (index + 1) * 0x9E3779B97F4A7C15u) >> 16) * 0x1p-48;
}

// One token for each of LANES rows; false where a row's logits give no distribution.
bool draw_lanes(const float *logits, int64_t stride, int64_t vocab, const float *temperature, const double *number,
                int64_t rows, int32_t *token, float *logprob, float *chances) {
    Vec heat = all<Vec>(1.0f), most = all<Vec>(NEVER);
    Bits best{};
    bool tempered = false, greedy = false;
    for (int lane = 0; lane < rows; lane++) {
        if (temperature[lane] > 0) heat[lane] = temperature[lane], tempered |= temperature[lane] != 1;
        else greedy = true;
    }
    for (int64_t i = 0; i < vocab; i++) {
        Vec x = *(const Vec *)(logits + i * stride);
        Bits above = x > most;
        if (greedy) best = above ? Bits{} + (int32_t)i : best;
        most = above ? x : most;
    }
    if (tempered) most = most / heat;
    double total[LANES] = {}, sum[LANES] = {}, target[LANES];
    for (int64_t i = 0; i < vocab; i++) {
        Vec x = *(const Vec *)(logits + i * stride);
        if (tempered) x = x / heat;
        Vec chance = exponential<Vec, Bits>(x - most);
        *(Vec *)(chances + i * LANES) = chance;
        for (int lane = 0; lane < LANES; lane++) total[lane] += chance[lane];
    }
    for (int lane = 0; lane < LANES; lane++) target[lane] = lane < rows ? number[lane] * total[lane] : -1;
    int64_t passed[LANES] = {};
    for (int64_t i = 0; i < vocab; i++) {
        int64_t behind = 0;
        for (int lane = 0; lane < LANES; lane++) {
            sum[lane] += chances[i * LANES + lane];
            passed[lane] += sum[lane] <= target[lane];
            behind += sum[lane] <= target[lane];
        }
        if (!behind) break;
    }
    for (int lane = 0; lane < rows; lane++) {
        if (!std::isfinite(total[lane])) return false;
        const bool point = temperature[lane] == 0;
        token[lane] = point ? best[lane] : (int32_t)passed[lane];
        float x = logits[token[lane] * stride + lane];
        if (tempered) x = x / heat[lane];
        logprob[lane] = point ? 0.0f : (x - most[lane]) - (float)std::log(total[lane]);
    }
    return true;
}

}  // namespace

extern "C" {

// Draw a token for rows first.. from logits [vocab][stride] and write it down. Returns how many rows ended: ended[i] is
// then the row and reason[i] 1 where a stop token ended it. -1, with nothing changed: some logits give no distribution.
int64_t tutti_draw(const Rows *rows, int64_t first, int64_t n, const float *logits, int64_t stride, int64_t vocab,
                   int64_t version, int64_t *ended, int64_t *reason) {
    static thread_local std::vector<int32_t> tokens;
    static thread_local std::vector<float> logprobs;
    tokens.resize(n), logprobs.resize(n);
    float *chances = scratch(vocab * LANES);
    for (int64_t at = 0; at < n; at += LANES) {
        const int64_t some = n - at < LANES ? n - at : LANES;
        double number[LANES];
        for (int64_t i = 0; i < some; i++) {
            const int64_t *row = rows->ints + (first + at + i) * 6;
            number[i] = uniform(row[4], row[2] + row[5]);
        }
        if (!draw_lanes(logits + at, stride, vocab, rows->temperature + first + at, number, some, &tokens[at],
                        &logprobs[at], chances))
            return -1;
    }
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t *row = rows->ints + (first + i) * 6;
        int32_t *record = rows->output + ((first + i) * rows->most + row[2]) * 3;
        record[0] = tokens[i], record[2] = (int32_t)version;
        std::memcpy(record + 1, &logprobs[i], 4);
        row[0] = tokens[i];
        row[2] += 1;
        const int64_t *stops = rows->stops + (first + i) * rows->num_stops;
        bool stop = false;
        for (int64_t s = 0; s < rows->num_stops; s++) stop |= stops[s] == tokens[i];
        if (stop || row[2] >= row[3]) ended[count] = first + i, reason[count++] = stop;
    }
    return count;
}

}  // extern "C"
