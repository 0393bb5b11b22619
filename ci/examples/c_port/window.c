/* The ring of the last W positions (numerics.md 6, item 3). */
#include <stdlib.h>
#include <string.h>

#include "port.h"

Status window_indices(const Json *arguments, Results *results) {
    long window = setting(arguments, "window_size");
    long start = (long)json_number(json_member(json_member(arguments, "start_pos"), "value"), -1);
    long length = (long)json_number(json_member(json_member(arguments, "length"), "value"), -1);
    if (window < 1 || start < 0 || length < 1) return refuse(results, "window_size, start_pos or length is missing");
    if (start > 0 && length > 1) return refuse(results, "several tokens after position 0");
    long entries = start == 0 && length < window ? length : window;
    int32_t *listed = add_result(results, "indices", "I32", 2, (size_t[]){(size_t)length, (size_t)entries});
    if (!listed) return FAILED;
    for (long t = 0; t < length; t++) {
        long first = start == 0 ? (t < window ? 0 : t - window + 1) : start - window + 1;
        for (long i = 0; i < entries; i++) {
            long position = first + i;
            long row = start == 0 ? position : position % window; /* rows of this call, or slots */
            listed[t * entries + i] = position >= 0 && position <= start + t ? (int32_t)row : -1;
        }
    }
    return OK;
}

Status window_update(const Json *arguments, Results *results) {
    Tensor ring = {0}, rows = {0};
    long start = (long)json_number(json_member(json_member(arguments, "start_pos"), "value"), -1);
    Status status = FAILED;
    bool good = start >= 0 && tensor_argument(arguments, "ring", "BF16", 3, &ring) &&
                tensor_argument(arguments, "rows", "BF16", 3, &rows) && ring.shape[0] == rows.shape[0] &&
                ring.shape[2] == rows.shape[2] && ring.shape[1] > 0;
    if (!good) {
        status = refuse(results, "ring and rows must be bf16 [batch, rows, features]");
    } else {
        size_t window = ring.shape[1], width = ring.shape[2], length = rows.shape[1];
        uint16_t *out = add_result(results, "window", "BF16", 3, ring.shape);
        if (out) {
            memcpy(out, ring.data, ring.count * sizeof *out);
            for (size_t b = 0; b < ring.shape[0]; b++)
                for (size_t t = 0; t < length; t++) { /* of a long call the last rows win */
                    size_t slot = ((size_t)start + t) % window;
                    const uint16_t *row = (uint16_t *)rows.data + (b * length + t) * width;
                    memcpy(out + (b * window + slot) * width, row, width * sizeof *out);
                }
            status = OK;
        }
    }
    free(ring.data);
    free(rows.data);
    return status;
}
