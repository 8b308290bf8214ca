/* One step of Automagic on one tensor in CPU memory, in three passes over the memory. optimizer.py describes the
   algorithm and has the same step in torch operations; packed_rates.py describes the layout of `low`, `high` and
   `signs`. Sums have a fixed order and no multiply-add is fused, so the result is the same on every CPU whatever
   instructions it has. Loaded with ctypes. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define WIDE __attribute__((target_clones("avx2", "default")))
#else
#define WIDE
#endif
#define INLINE static inline __attribute__((always_inline))

enum { LANES = 16, BLOCK = 1024, ROWS = 64 };

struct step {
    const float *gradient;
    float *weights, *row, *column;
    uint8_t *low, *high, *signs;
    float *row_factor, *column_factor, *sums; /* scratch: rows, columns, 2 columns */
    uint8_t *new_signs;                       /* scratch: as many as signs */
    int64_t rows, columns, padded;
    float share; /* 1 - beta2 */
    float epsilon, clip, factor, decay;
    float lowest, highest, offset; /* the grid of rates, as rate_grid.py describes it; in units */
    int32_t top, split, bump;      /* the highest code; the grid's `split` and `step` */
    int32_t first;                 /* there is no last update to compare with */
};

INLINE float total(float *lanes) {
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

/* The sum of one row's squares; each square is also added to its column. */
INLINE float squares(const float *restrict g, float *restrict columns, int64_t n) {
    float lanes[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++) {
            float square = g[i + lane] * g[i + lane];
            lanes[lane] += square;
            columns[i + lane] += square;
        }
    for (; i < n; i++) {
        lanes[0] += g[i] * g[i];
        columns[i] += g[i] * g[i];
    }
    return total(lanes);
}

INLINE float scaled_squares(const float *restrict g, const float *restrict factors, int64_t n) {
    float lanes[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++) {
            float scaled = g[i + lane] * factors[i + lane];
            lanes[lane] += scaled * scaled;
        }
    for (; i < n; i++) lanes[0] += g[i] * factors[i] * (g[i] * factors[i]);
    return total(lanes);
}

INLINE void scale(const float *restrict g, const float *restrict factors, float factor, float *restrict out,
                  int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] = g[i] * factor * factors[i];
}

/* Move the rates of n consecutive elements of one plane of bits, and update their weights. `plane` (0–7) is the bit of
   these elements in a byte of `signs`; `pair` is the lower of their two bits in a byte of `high`. */
INLINE void move(const float *restrict g, const float *restrict updates, float *restrict weights,
                 uint8_t *restrict low, uint8_t *restrict high, const uint8_t *restrict signs,
                 uint8_t *restrict new_signs, int plane, const struct step *s, int64_t n) {
    const int pair = plane / 2 * 2;
    const int32_t bump = s->first ? 0 : s->bump, top = s->top, split = s->split;
    const float lowest = s->lowest, highest = s->highest, offset = s->offset, decay = s->decay;
    for (int64_t i = 0; i < n; i++) {
        int32_t negative = g[i] < 0.0f, some = g[i] != 0.0f;
        int32_t differs = negative ^ (signs[i] >> plane & 1);
        int32_t moved = (some - 2 * (some & differs)) * bump;
        int32_t code = low[i] + (high[i] >> pair & 3) * 256 + moved;
        code += code < split ? moved : 0;
        code = code < 0 ? 0 : code;
        code = code > top ? top : code;
        int32_t doubled = code < split ? code : split;
        float rate = (float)(code - ((doubled + 1) >> 1)) + (float)(doubled & 1) * offset + lowest;
        rate = rate > highest ? highest : rate;
        low[i] = (uint8_t)code;
        high[i] = (uint8_t)((high[i] & ~(3 << pair)) | code >> 8 << pair);
        new_signs[i] = (uint8_t)(new_signs[i] | negative << plane);
        weights[i] -= (updates[i] + decay * weights[i]) * rate;
    }
}

/* First pass: the factored second moments, row and column means of the squared gradient. */
INLINE void moments(const struct step *s) {
    float *part = s->sums, *whole = s->sums + s->columns;
    memset(s->sums, 0, sizeof(float) * 2 * (size_t)s->columns);
    for (int64_t r = 0; r < s->rows; r++) {
        float mean = squares(s->gradient + r * s->columns, part, s->columns) / (float)s->columns;
        s->row[r] += s->share * (mean + s->epsilon - s->row[r]);
        if (r % ROWS == ROWS - 1 || r == s->rows - 1) { /* sums of at most ROWS rows first: long fp32 sums lose digits */
            for (int64_t c = 0; c < s->columns; c++) whole[c] += part[c];
            memset(part, 0, sizeof(float) * (size_t)s->columns);
        }
    }
    for (int64_t c = 0; c < s->columns; c++)
        s->column[c] += s->share * (whole[c] / (float)s->rows + s->epsilon - s->column[c]);
}

/* The factors of rows and columns that turn the gradient into the clipped update. */
INLINE void factors(const struct step *s) {
    double mean = 0, squared = 0;
    for (int64_t r = 0; r < s->rows; r++) mean += s->row[r];
    mean /= (double)s->rows;
    for (int64_t r = 0; r < s->rows; r++) s->row_factor[r] = 1.0f / sqrtf(s->row[r] / (float)mean);
    for (int64_t c = 0; c < s->columns; c++) s->column_factor[c] = 1.0f / sqrtf(s->column[c]);
    for (int64_t r = 0; r < s->rows; r++)
        squared += (double)scaled_squares(s->gradient + r * s->columns, s->column_factor, s->columns) *
                   s->row_factor[r] * s->row_factor[r];
    double rms = sqrt(squared / ((double)s->rows * (double)s->columns)) / s->clip;
    float factor = (float)(s->factor / (rms > 1 ? rms : 1));
    for (int64_t r = 0; r < s->rows; r++) s->row_factor[r] *= factor;
}

/* The updates of n elements from `begin` on, which may span several rows. */
INLINE void updates(const struct step *s, int64_t begin, int64_t n, float *out) {
    int64_t r = begin / s->columns, c = begin % s->columns, some;
    for (int64_t done = 0; done < n; done += some, r++, c = 0) {
        some = s->columns - c < n - done ? s->columns - c : n - done;
        scale(s->gradient + begin + done, s->column_factor + c, s->row_factor[r], out + done, some);
    }
}

/* The elements of one plane are contiguous (packed_rates.py), so each plane is processed as blocks of plain arrays. */
WIDE void supertuner_automagic(const struct step *s) {
    float block[BLOCK];
    int64_t count = s->rows * s->columns, eighth = s->padded / 8;
    if (!count) return;
    moments(s);
    factors(s);
    memset(s->new_signs, 0, (size_t)eighth);
    for (int plane = 0; plane < 8; plane++) {
        int64_t begin = plane * eighth, end = begin + eighth < count ? begin + eighth : count;
        int64_t pair = plane / 2 * (s->padded / 4); /* where this plane's pair of bits begins */
        for (int64_t at = begin; at < end; at += BLOCK) {
            int64_t n = end - at < BLOCK ? end - at : BLOCK;
            updates(s, at, n, block);
            move(s->gradient + at, block, s->weights + at, s->low + at, s->high + (at - pair), s->signs + (at - begin),
                 s->new_signs + (at - begin), plane, s, n);
        }
    }
    memcpy(s->signs, s->new_signs, (size_t)eighth);
}
