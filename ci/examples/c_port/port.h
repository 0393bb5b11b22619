/* The methods that this port has.  Each reads its arguments from a request and fills in results. */
#ifndef PORT_H
#define PORT_H

#include "json.h"
#include "tensors.h"

typedef enum { OK, UNSUPPORTED, FAILED } Status;

typedef struct {
    Tensor tensors[MOST_RESULTS];
    int count;
    const char *message; /* why it is unsupported or has failed */
} Results;

typedef Status Method(const Json *arguments, Results *results);

/* Makes room for the next result; NULL where memory is out. */
void *add_result(Results *results, const char *name, const char *dtype, int rank, const size_t *shape);
Status refuse(Results *results, const char *why);
/* A whole number of the configuration. */
long setting(const Json *arguments, const char *name);

Method quantize_fp8, quantize_fp4_e8m0, quantize_fp4_e4m3;
Method fake_quantize_fp8, fake_quantize_fp4_e8m0, fake_quantize_fp4_e4m3;
Method window_indices, window_update;
Method candidate_mask;
Method engram_layout, engram_hash;

/* numpy_random.c: `default_rng(seed).integers(0, high, size)` for high above 2^32. */
void numpy_integers(uint32_t seed, uint64_t high, int size, int64_t *values);

#endif
