/* The few lines of numpy's generator that Engram's multipliers come from: SeedSequence, PCG64 and bounded integers. */
#include "port.h"

__extension__ typedef unsigned __int128 uint128;

typedef struct {
    uint128 state, increment;
} Pcg64;

static uint64_t next(Pcg64 *generator) {
    const uint128 multiplier = (uint128)0x2360ED051FC65DA4u << 64 | 0x4385DF649FCCF645u;
    generator->state = generator->state * multiplier + generator->increment;
    uint64_t mixed = (uint64_t)(generator->state >> 64) ^ (uint64_t)generator->state;
    unsigned turn = (unsigned)(generator->state >> 122);
    return mixed >> turn | mixed << (-turn & 63);
}

static uint32_t hashed(uint32_t value, uint32_t *constant, uint32_t multiplier) {
    value ^= *constant;
    *constant *= multiplier;
    value *= *constant;
    return value ^ value >> 16;
}

/* The words that a seed of 32 bits is spread over. */
static void spread(uint32_t seed, uint32_t words[8]) {
    uint32_t pool[4], constant = 0x43B0D7E5;
    for (int i = 0; i < 4; i++) pool[i] = hashed(i == 0 ? seed : 0, &constant, 0x931E8875);
    for (int from = 0; from < 4; from++)
        for (int to = 0; to < 4; to++)
            if (from != to) {
                uint32_t mixed = 0xCA01F9DDu * pool[to] - 0x4973F715u * hashed(pool[from], &constant, 0x931E8875);
                pool[to] = mixed ^ mixed >> 16;
            }
    constant = 0x8B51F9DD;
    for (int i = 0; i < 8; i++) words[i] = hashed(pool[i % 4], &constant, 0x58F38DED);
}

static uint128 wide(const uint32_t *words) {
    uint64_t high = (uint64_t)words[1] << 32 | words[0], low = (uint64_t)words[3] << 32 | words[2];
    return (uint128)high << 64 | low;
}

void numpy_integers(uint32_t seed, uint64_t high, int size, int64_t *values) {
    uint32_t words[8];
    spread(seed, words);
    Pcg64 generator = {0, wide(words + 4) << 1 | 1};
    next(&generator);
    generator.state += wide(words);
    next(&generator);
    for (int i = 0; i < size; i++) {
        /* Numbers whose low half is below this would make some results likelier than others. */
        uint64_t unfair = -high % high;
        uint128 product;
        do product = (uint128)next(&generator) * high;
        while ((uint64_t)product < unfair);
        values[i] = (int64_t)(product >> 64);
    }
}
