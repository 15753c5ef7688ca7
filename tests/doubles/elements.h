/* Arithmetic on every data type of NCCL, element by element. Sums of half types are rounded at each
 * step, minima and maxima of floats drop NaN, an average of floats is a sum of scaled values, one of
 * integers is divided at the end and rounds toward zero: as NCCL's kernels do it
 * (src/device/reduce_kernel.h of 2.32). */
#ifndef GPUCOLL_ELEMENTS_H
#define GPUCOLL_ELEMENTS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, E4M3, E5M2, TYPES };
enum { SUM, PROD, MAX, MIN, AVG, OPS };

static const size_t SIZES[TYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

struct format {
    int exponent_bits, mantissa_bits, has_infinity;
};
static const struct format FORMATS[TYPES] = {
    [FLOAT16] = {5, 10, 1}, [BFLOAT16] = {8, 7, 1}, [E4M3] = {4, 3, 0}, [E5M2] = {5, 2, 1}};

static double decode(int type, const void *from)
{
    if (type == FLOAT32) {
        float f;
        memcpy(&f, from, sizeof f);
        return f;
    }
    if (type == FLOAT64) {
        double d;
        memcpy(&d, from, sizeof d);
        return d;
    }
    struct format f = FORMATS[type];
    uint16_t bits = 0;
    memcpy(&bits, from, SIZES[type]);
    int top = (1 << f.exponent_bits) - 1, bias = top >> 1;
    int mantissa = bits & ((1 << f.mantissa_bits) - 1);
    int exponent = bits >> f.mantissa_bits & top;
    double sign = bits >> (f.exponent_bits + f.mantissa_bits) & 1 ? -1 : 1;
    if (exponent == top && f.has_infinity)
        return mantissa ? NAN : sign * INFINITY;
    if (exponent == top && mantissa == (1 << f.mantissa_bits) - 1)
        return NAN;
    if (!exponent)
        return sign * ldexp(mantissa, 1 - bias - f.mantissa_bits);
    return sign * ldexp((1 << f.mantissa_bits) + mantissa, exponent - bias - f.mantissa_bits);
}

/* Round to the nearest, ties to even; float8 saturates. */
static void encode(int type, double value, void *to)
{
    if (type == FLOAT32) {
        float f = (float)value;
        memcpy(to, &f, sizeof f);
        return;
    }
    if (type == FLOAT64) {
        memcpy(to, &value, sizeof value);
        return;
    }
    struct format f = FORMATS[type];
    int top = (1 << f.exponent_bits) - 1, bias = top >> 1, m = f.mantissa_bits;
    int sign = signbit(value) ? 1 << (f.exponent_bits + m) : 0, is_float8 = SIZES[type] == 1;
    int infinity = top << m, largest = f.has_infinity ? infinity - 1 : infinity + (1 << m) - 2;
    int bits;
    if (isnan(value)) {
        bits = f.has_infinity ? infinity | 1 << (m - 1) : infinity | ((1 << m) - 1);
    } else if (isinf(value)) {
        bits = is_float8 ? largest : infinity;
    } else {
        int exponent;
        frexp(value, &exponent);
        exponent = value == 0 || exponent - 1 < 1 - bias ? 1 - bias : exponent - 1;
        double steps = nearbyint(ldexp(fabs(value), m - exponent));
        /* A subnormal has no leading one to take away; a carry goes into the exponent by itself. */
        bits = (int)steps + ((exponent + bias - 1) << m);
        if (bits > largest)
            bits = is_float8 ? largest : infinity;
    }
    uint16_t word = (uint16_t)(bits | sign);
    memcpy(to, &word, SIZES[type]);
}

#define INTEGERS(CASE)                                                                         \
    CASE(INT8, int8_t, uint8_t)                                                                \
    CASE(UINT8, uint8_t, uint8_t)                                                              \
    CASE(INT32, int32_t, uint32_t)                                                             \
    CASE(UINT32, uint32_t, uint32_t)                                                           \
    CASE(INT64, int64_t, uint64_t)                                                             \
    CASE(UINT64, uint64_t, uint64_t)

/* to = to op from */
static void combine(int type, int op, void *to, const void *from)
{
    switch (type) {
#define CASE(name, T, U)                                                                       \
    case name: {                                                                               \
        T a, b;                                                                                \
        memcpy(&a, to, sizeof a);                                                              \
        memcpy(&b, from, sizeof b);                                                            \
        a = op == PROD  ? (T)((uint64_t)(U)a * (U)b)                                           \
            : op == MAX ? (a > b ? a : b)                                                      \
            : op == MIN ? (a < b ? a : b)                                                      \
                        : (T)((U)a + (U)b);                                                    \
        memcpy(to, &a, sizeof a);                                                              \
        return;                                                                                \
    }
        INTEGERS(CASE)
#undef CASE
    }
    double a = decode(type, to), b = decode(type, from);
    encode(type, op == PROD ? a * b : op == MAX ? fmax(a, b) : op == MIN ? fmin(a, b) : a + b, to);
}

/* value = value * factor, both of the type */
static void scale(int type, void *value, const void *factor)
{
    combine(type, PROD, value, factor);
}

/* What an average multiplies its inputs by; integers are divided at the end. */
static void reciprocal(int type, int count, void *to)
{
    encode(type, 1.0 / count, to);
}

static int is_integer(int type) { return type <= UINT64; }

static void divide(int type, void *value, int count)
{
    switch (type) {
#define CASE(name, T, U)                                                                       \
    case name: {                                                                               \
        T a;                                                                                   \
        memcpy(&a, value, sizeof a);                                                           \
        a = (T)(a / (T)count);                                                                 \
        memcpy(value, &a, sizeof a);                                                           \
        return;                                                                                \
    }
        INTEGERS(CASE)
#undef CASE
    }
}

#endif
