/* Tensors of arguments and results. */
#ifndef TENSORS_H
#define TENSORS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "json.h"

enum { LARGEST_RANK = 8, MOST_RESULTS = 4 };

typedef struct {
    char name[32];
    char dtype[16];     /* what the elements mean */
    int rank;
    size_t shape[LARGEST_RANK];
    size_t count;       /* elements */
    void *data;         /* row-major; to be freed */
} Tensor;

/* The tensor argument of a request.  False where there is none, or it cannot be read. */
bool tensor_argument(const Json *arguments, const char *name, const char *dtype, int rank, Tensor *tensor);

/* Room for a result.  False where memory is out. */
bool tensor_result(Tensor *tensor, const char *name, const char *dtype, int rank, const size_t *shape);

/* A safetensors file with all results. */
bool tensors_write(const char *path, const Tensor *tensors, int count);

float bf16_to_float(uint16_t bits);
uint16_t float_to_bf16(float x);

#endif
