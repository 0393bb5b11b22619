/* Engram's hash of the last tokens, and the numbers it works with (numerics.md 8). */
#include <stdlib.h>
#include <string.h>

#include "port.h"

enum { LARGEST_NGRAM = 8, MOST_HEADS = 16, MOST_LAYERS = 8 };

typedef struct {
    long layers, ngram, heads, columns;
    long ids[MOST_LAYERS];
    int64_t multipliers[MOST_LAYERS][LARGEST_NGRAM];
    int64_t primes[MOST_LAYERS][LARGEST_NGRAM * MOST_HEADS];
    int64_t offsets[MOST_LAYERS][LARGEST_NGRAM * MOST_HEADS];
} Layout;

static bool is_prime(int64_t n) {
    for (int64_t divisor = 2; divisor * divisor <= n; divisor++)
        if (n % divisor == 0) return false;
    return n > 1;
}

static bool is_used(const Layout *layout, long layer, long column, int64_t prime) {
    for (long l = 0; l <= layer; l++)
        for (long c = 0; c < (l < layer ? layout->columns : column); c++)
            if (layout->primes[l][c] == prime) return true;
    return false;
}

static bool make_layout(const Json *arguments, Layout *layout) {
    const Json *ids = json_member(json_member(json_member(arguments, "config"), "value"), "engram_layer_ids");
    int64_t size = setting(arguments, "engram_vocab_size");
    int64_t vocabulary = setting(arguments, "engram_compressed_vocab_size");
    layout->layers = json_length(ids);
    layout->ngram = setting(arguments, "engram_max_ngram_size");
    layout->heads = setting(arguments, "engram_n_heads");
    layout->columns = (layout->ngram - 1) * layout->heads;
    if (layout->layers < 1 || layout->layers > MOST_LAYERS) return false;
    if (layout->ngram < 2 || layout->ngram > LARGEST_NGRAM) return false;
    if (layout->heads < 1 || layout->heads > MOST_HEADS || size < 2 || vocabulary < 1) return false;
    uint64_t largest = (uint64_t)(INT64_MAX / vocabulary / 2);
    if (largest <= UINT32_MAX) return false; /* numpy draws smaller numbers in another way */
    long layer = 0;
    for (const Json *id = ids->first; id; id = id->next, layer++) {
        layout->ids[layer] = (long)json_number(id, -1);
        numpy_integers((uint32_t)(10007 * layout->ids[layer]), largest, (int)layout->ngram, layout->multipliers[layer]);
        for (long i = 0; i < layout->ngram; i++) layout->multipliers[layer][i] = layout->multipliers[layer][i] * 2 + 1;
        int64_t prime = 0, offset = 0;
        for (long column = 0; column < layout->columns; column++) {
            if (column % layout->heads == 0) prime = size - 1; /* the search restarts with each length of n-gram */
            do prime++;
            while (!is_prime(prime) || is_used(layout, layer, column, prime));
            layout->primes[layer][column] = prime;
            layout->offsets[layer][column] = offset;
            offset += prime;
        }
    }
    return true;
}

Status engram_layout(const Json *arguments, Results *results) {
    Layout layout;
    if (!make_layout(arguments, &layout)) return refuse(results, "a configuration without Engram, or a larger one");
    size_t layers = (size_t)layout.layers, ngram = (size_t)layout.ngram, heads = (size_t)layout.heads;
    int64_t *multipliers = add_result(results, "multipliers", "I64", 2, (size_t[]){layers, ngram});
    int64_t *primes = add_result(results, "primes", "I64", 3, (size_t[]){layers, ngram - 1, heads});
    int64_t *offsets = add_result(results, "offsets", "I64", 2, (size_t[]){layers, (ngram - 1) * heads});
    if (!multipliers || !primes || !offsets) return FAILED;
    for (size_t layer = 0; layer < layers; layer++) {
        size_t columns = (ngram - 1) * heads;
        memcpy(multipliers + layer * ngram, layout.multipliers[layer], ngram * sizeof(int64_t));
        memcpy(primes + layer * columns, layout.primes[layer], columns * sizeof(int64_t));
        memcpy(offsets + layer * columns, layout.offsets[layer], columns * sizeof(int64_t));
    }
    return OK;
}

/* Rows of one request; `image` is NULL without images. */
static void hash_request(const Layout *layout, long layer, const int32_t *map, int64_t pad, const int32_t *ids,
                         const uint8_t *image, size_t length, int64_t *rows) {
    const int64_t *primes = layout->primes[layer], *offsets = layout->offsets[layer];
    for (size_t position = 0; position < length; position++) {
        bool reached = true;
        int64_t hash = 0;
        for (size_t back = 0; back < (size_t)layout->ngram; back++) {
            /* A look-back ends, for good, at the beginning and at an image token, its own included. */
            reached = reached && back <= position && !(image && image[position - back]);
            int64_t id = reached ? map[ids[position - back]] : pad;
            hash ^= id * layout->multipliers[layer][back];
            for (size_t head = 0; back > 0 && head < (size_t)layout->heads; head++) {
                size_t column = (back - 1) * (size_t)layout->heads + head;
                rows[position * (size_t)layout->columns + column] = hash % primes[column] + offsets[column];
            }
        }
    }
}

Status engram_hash(const Json *arguments, Results *results) {
    Layout layout;
    Tensor map = {0}, ids = {0}, image = {0};
    long layer = 0, layer_id = (long)json_number(json_member(json_member(arguments, "layer_id"), "value"), -1);
    long pad = setting(arguments, "engram_pad_id");
    bool has_image = json_member(json_member(arguments, "image_mask"), "tensor") != NULL;
    bool good = make_layout(arguments, &layout);
    while (good && layer < layout.layers && layout.ids[layer] != layer_id) layer++;
    good = good && layer < layout.layers && tensor_argument(arguments, "token_map", "I32", 1, &map) &&
           tensor_argument(arguments, "input_ids", "I32", 2, &ids) && pad >= 0 && (size_t)pad < map.count &&
           (!has_image || (tensor_argument(arguments, "image_mask", "BOOL", 2, &image) && image.count == ids.count));
    for (size_t i = 0; good && i < ids.count; i++) {
        int32_t id = ((int32_t *)ids.data)[i];
        good = id >= 0 && (size_t)id < map.count;
    }
    int64_t *rows = NULL;
    if (good) {
        size_t length = ids.shape[1], columns = (size_t)layout.columns;
        const uint8_t *images = image.data;
        rows = add_result(results, "engram_hash", "I64", 3, (size_t[]){ids.shape[0], length, columns});
        for (size_t b = 0; rows && b < ids.shape[0]; b++)
            hash_request(&layout, layer, map.data, ((int32_t *)map.data)[pad], (int32_t *)ids.data + b * length,
                         images ? images + b * length : NULL, length, rows + b * length * columns);
    }
    free(map.data);
    free(ids.data);
    free(image.data);
    if (!good) return refuse(results, "a layer without Engram, or arguments of another shape");
    return rows ? OK : FAILED;
}
