/* Recipe tensors in C: weights and inputs at the released sizes without a download (fixtures/RECIPE.md).
 *
 *     cc -O2 -o recipe recipe.c && ./recipe 41 x/hc layers.24.ffn.experts.7.w1.weight
 *
 * prints the test vectors of each name as JSON, one line a name: the shape of fixtures/released/recipe.json.
 * Needs a C99 compiler and nothing else; byte order does not matter.
 */
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* SHA-256 (FIPS 180-4), for one message at a time. */

static const uint32_t ROUND[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t rotate(uint32_t x, int by) { return x >> by | x << (32 - by); }

static void compress(uint32_t state[8], const uint8_t block[64]) {
    uint32_t w[64], s[8];
    for (int i = 0; i < 16; i++)
        w[i] = (uint32_t)block[4 * i] << 24 | (uint32_t)block[4 * i + 1] << 16 | (uint32_t)block[4 * i + 2] << 8 |
               block[4 * i + 3];
    for (int i = 16; i < 64; i++) {
        uint32_t low = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3;
        uint32_t high = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10;
        w[i] = w[i - 16] + low + w[i - 7] + high;
    }
    memcpy(s, state, sizeof s);
    for (int i = 0; i < 64; i++) {
        uint32_t one = rotate(s[4], 6) ^ rotate(s[4], 11) ^ rotate(s[4], 25);
        uint32_t first = s[7] + one + ((s[4] & s[5]) ^ (~s[4] & s[6])) + ROUND[i] + w[i];
        uint32_t zero = rotate(s[0], 2) ^ rotate(s[0], 13) ^ rotate(s[0], 22);
        uint32_t second = zero + ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
        memmove(s + 1, s, 7 * sizeof *s);
        s[4] += first;
        s[0] = first + second;
    }
    for (int i = 0; i < 8; i++) state[i] += s[i];
}

static void sha256(const char *text, uint32_t state[8]) {
    static const uint32_t START[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    size_t length = strlen(text), left = length;
    uint8_t block[64];
    memcpy(state, START, sizeof START);
    for (; left >= 64; left -= 64, text += 64) compress(state, (const uint8_t *)text);
    memset(block, 0, sizeof block);
    memcpy(block, text, left);
    block[left] = 0x80;
    if (left >= 56) {
        compress(state, block);
        memset(block, 0, sizeof block);
    }
    for (int i = 0; i < 8; i++) block[63 - i] = (uint8_t)((uint64_t)length * 8 >> 8 * i);
    compress(state, block);
}

/* The recipe. */

static uint64_t recipe_key(const char *text) {
    uint32_t digest[8];
    uint64_t key = 0;
    sha256(text, digest);
    for (int i = 7; i >= 0; i--) key = key << 8 | (digest[i / 4] >> (24 - 8 * (i % 4)) & 0xff);
    return key;
}

static uint64_t recipe_u(uint64_t key, uint64_t i) {
    uint64_t z = key + (i + 1) * UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
    return z ^ z >> 31;
}

static unsigned recipe_byte(uint64_t key, uint64_t i) { return recipe_u(key, i / 8) >> 8 * (i % 8) & 0xff; }

static int recipe_n(uint64_t key, uint64_t i) {
    uint64_t half = recipe_u(key, i / 2) >> 32 * (i % 2);
    return (int)(half & 0xff) + (int)(half >> 8 & 0xff) + (int)(half >> 16 & 0xff) + (int)(half >> 24 & 0xff) - 510;
}

int main(int argc, char **argv) {
    char text[512];
    if (argc < 3) {
        fprintf(stderr, "usage: recipe SEED NAME...\n");
        return 2;
    }
    for (int a = 2; a < argc; a++) {
        if (snprintf(text, sizeof text, "%s/%s", argv[1], argv[a]) >= (int)sizeof text) {
            fprintf(stderr, "recipe: name too long: %s\n", argv[a]);
            return 2;
        }
        uint64_t key = recipe_key(text);
        printf("{\"name\": \"%s\", \"key\": \"0x%016" PRIx64 "\", \"u\": [", argv[a], key);
        for (int i = 0; i < 3; i++) printf("%s\"0x%016" PRIx64 "\"", i ? ", " : "", recipe_u(key, i));
        printf("], \"bytes\": [");
        for (int i = 0; i < 12; i++) printf("%s%u", i ? ", " : "", recipe_byte(key, i));
        printf("], \"n\": [");
        for (int i = 0; i < 6; i++) printf("%s%d", i ? ", " : "", recipe_n(key, i));
        printf("]}\n");
    }
    return 0;
}
