/* Level one of the selection: whole blocks of compressed rows (numerics.md 6.3). */
#include <math.h>
#include <stdlib.h>

#include "port.h"

typedef struct {
    float score;
    size_t block;
} Ranked;

static int best_first(const void *a, const void *b) {
    const Ranked *left = a, *right = b;
    if (left->score != right->score) return left->score < right->score ? 1 : -1;
    return left->block < right->block ? -1 : 1;
}

/* `ranked` has room for every block. */
static void mask_query(const uint16_t *scores, size_t rows, size_t size, size_t kept, long visible, Ranked *ranked,
                       uint8_t *mask) {
    size_t blocks = (rows + size - 1) / size;
    for (size_t block = 0; block < blocks; block++) {
        ranked[block] = (Ranked){-INFINITY, block};
        for (size_t row = block * size; row < rows && row < (block + 1) * size; row++)
            ranked[block].score = fmaxf(ranked[block].score, bf16_to_float(scores[row]));
        /* The block of the newest visible row is always kept. */
        if (visible > 0 && block == (size_t)(visible - 1) / size) ranked[block].score = INFINITY;
    }
    qsort(ranked, blocks, sizeof *ranked, best_first);
    for (size_t i = 0; i < blocks && i < kept && ranked[i].score > -INFINITY; i++) {
        size_t begin = ranked[i].block * size;
        for (size_t row = begin; row < rows && row < begin + size; row++) mask[row] = 1;
    }
}

Status candidate_mask(const Json *arguments, Results *results) {
    Tensor scores = {0}, positions = {0};
    const Json *ratio = json_member(json_member(json_member(arguments, "config"), "value"), "compress_ratios");
    long layer = (long)json_number(json_member(json_member(arguments, "layer_id"), "value"), -1);
    ratio = ratio ? ratio->first : NULL;
    for (long i = 0; ratio && i < layer; i++) ratio = ratio->next;
    long tokens = (long)json_number(ratio, 0), size = setting(arguments, "candidate_block_size");
    long kept = setting(arguments, "candidate_topk_blocks");
    if (layer < 0 || tokens < 1 || size < 1 || kept < 1 || !tensor_argument(arguments, "scores", "BF16", 3, &scores) ||
        !tensor_argument(arguments, "positions", "I64", 2, &positions) ||
        positions.count != scores.shape[0] * scores.shape[1]) {
        free(scores.data);
        free(positions.data);
        return refuse(results, "scores [batch, tokens, rows] in bf16 and positions [batch, tokens] are needed");
    }
    size_t rows = scores.shape[2];
    uint8_t *mask = add_result(results, "candidates", "BOOL", 3, scores.shape);
    Ranked *ranked = calloc(rows / (size_t)size + 1, sizeof *ranked);
    for (size_t query = 0; mask && ranked && query < positions.count; query++) {
        long visible = (long)((((int64_t *)positions.data)[query] + 1) / tokens);
        mask_query((uint16_t *)scores.data + query * rows, rows, (size_t)size, (size_t)kept, visible, ranked,
                   mask + query * rows);
    }
    bool good = mask && ranked;
    free(ranked);
    free(scores.data);
    free(positions.data);
    return good ? OK : FAILED;
}
