/* Quantisers (numerics.md 2). */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "port.h"

typedef struct {
    int mantissa_bits, smallest_exponent, sign_bit;
    float largest;
} Format;

typedef struct {
    const char *scale_dtype;
    Format format;
    size_t group;
    float floor;
} Quantizer;

static const Format E4M3 = {3, -6, 0x80, 448.0f};
static const Quantizer Q8 = {"F8_E8M0", {3, -6, 0x80, 448.0f}, 32, 1e-4f};
static const Quantizer Q4_E8M0 = {"F8_E8M0", {1, 0, 8, 6.0f}, 32, 6 * 0x1p-126f};
static const Quantizer Q4_E4M3 = {"F8_E4M3", {1, 0, 8, 6.0f}, 16, 6 * 0x1p-9f};

/* Exponent of the grid that x lies on: below the smallest normal number it is that of the subnormals. */
static int grid_exponent(const Format *format, float x) {
    int exponent = x == 0.0f ? format->smallest_exponent : ilogbf(x);
    return exponent < format->smallest_exponent ? format->smallest_exponent : exponent;
}

/* To the nearest number of the format, a tie to the even code; zero keeps its sign. */
static uint8_t encode(const Format *format, float x) {
    float magnitude = fminf(fabsf(x), format->largest);
    int exponent = grid_exponent(format, magnitude);
    int steps = (int)rintf(ldexpf(magnitude, format->mantissa_bits - exponent));
    int code = ((exponent - format->smallest_exponent) << format->mantissa_bits) + steps;
    return (uint8_t)(code | (signbit(x) ? format->sign_bit : 0));
}

static float decode(const Format *format, uint8_t code) {
    int field = (code & (format->sign_bit - 1)) >> format->mantissa_bits;
    int mantissa = code & ((1 << format->mantissa_bits) - 1);
    int hidden = field > 0 ? 1 << format->mantissa_bits : 0;
    int exponent = format->smallest_exponent + (field > 0 ? field - 1 : 0);
    float magnitude = ldexpf((float)(hidden + mantissa), exponent - format->mantissa_bits);
    return code & format->sign_bit ? -magnitude : magnitude;
}

/* The power of two at or above amax / largest, as its E8M0 code: the exponent, plus one when anything follows it. */
static uint8_t power_of_two(float amax, float largest) {
    float ratio = amax * (1.0f / largest);
    uint32_t bits;
    memcpy(&bits, &ratio, sizeof bits);
    return (uint8_t)((bits >> 23) + ((bits & 0x7FFFFF) != 0));
}

static void quantize_group(const Quantizer *q, const uint16_t *x, uint8_t *codes, uint8_t *scale_code, float *scale) {
    float amax = q->floor;
    for (size_t i = 0; i < q->group; i++) amax = fmaxf(amax, fabsf(bf16_to_float(x[i])));
    if (strcmp(q->scale_dtype, "F8_E8M0") == 0) {
        *scale_code = power_of_two(amax, q->format.largest);
        *scale = ldexpf(1.0f, *scale_code - 127);
    } else {
        *scale_code = encode(&E4M3, amax / q->format.largest);
        *scale = decode(&E4M3, *scale_code);
    }
    for (size_t i = 0; i < q->group; i++) codes[i] = encode(&q->format, bf16_to_float(x[i]) / *scale);
}

static Status quantize(const Quantizer *q, bool fake, const Json *arguments, Results *results) {
    Tensor x = {0};
    if (!tensor_argument(arguments, "x", "BF16", -1, &x) || x.rank < 1 || x.shape[x.rank - 1] % q->group) {
        free(x.data);
        return refuse(results, "x must be bf16 in whole groups");
    }
    bool packed = q->format.sign_bit == 8;
    size_t width = x.shape[x.rank - 1], shape[LARGEST_RANK];
    memcpy(shape, x.shape, sizeof shape);
    shape[x.rank - 1] = fake ? width : packed ? width / 2 : width;
    const char *dtype = fake ? "BF16" : packed ? "U8" : "F8_E4M3";
    void *out = add_result(results, fake ? "values" : "codes", dtype, x.rank, shape);
    shape[x.rank - 1] = width / q->group;
    uint8_t *scales = fake ? NULL : add_result(results, "scales", q->scale_dtype, x.rank, shape);
    for (size_t begin = 0; out && (fake || scales) && begin < x.count; begin += q->group) {
        uint8_t codes[32], scale_code;
        float scale;
        quantize_group(q, (uint16_t *)x.data + begin, codes, &scale_code, &scale);
        for (size_t i = 0; i < q->group; i++) {
            if (fake)
                ((uint16_t *)out)[begin + i] = float_to_bf16(decode(&q->format, codes[i]) * scale);
            else if (packed) /* the even element in the low nibble */
                ((uint8_t *)out)[(begin + i) / 2] |= (uint8_t)(codes[i] << (i % 2 ? 4 : 0));
            else
                ((uint8_t *)out)[begin + i] = codes[i];
        }
        if (!fake) scales[begin / q->group] = scale_code;
    }
    free(x.data);
    return out && (fake || scales) ? OK : FAILED;
}

Status quantize_fp8(const Json *a, Results *r) { return quantize(&Q8, false, a, r); }
Status quantize_fp4_e8m0(const Json *a, Results *r) { return quantize(&Q4_E8M0, false, a, r); }
Status quantize_fp4_e4m3(const Json *a, Results *r) { return quantize(&Q4_E4M3, false, a, r); }
Status fake_quantize_fp8(const Json *a, Results *r) { return quantize(&Q8, true, a, r); }
Status fake_quantize_fp4_e8m0(const Json *a, Results *r) { return quantize(&Q4_E8M0, true, a, r); }
Status fake_quantize_fp4_e4m3(const Json *a, Results *r) { return quantize(&Q4_E4M3, true, a, r); }
