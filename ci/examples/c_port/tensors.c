/* safetensors files: eight bytes with the length of a JSON header, the header, then the data.
 *
 * A request says at which byte of the file a tensor begins, so reading needs nothing of the header.  Both sides are
 * little-endian. */
#include "tensors.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static size_t width_of(const char *dtype) {
    static const struct { const char *name; size_t width; } widths[] = {
        {"F64", 8}, {"I64", 8}, {"F32", 4}, {"I32", 4}, {"BF16", 2}, {"F16", 2},
        {"U8", 1}, {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E8M0", 1}};
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++)
        if (strcmp(widths[i].name, dtype) == 0) return widths[i].width;
    return 0;
}

/* Files know the 8-bit floats as bytes. */
static const char *stored_dtype(const char *dtype) { return strncmp(dtype, "F8_", 3) == 0 ? "U8" : dtype; }

static bool set_shape(Tensor *tensor, const char *dtype, int rank, const size_t *shape) {
    snprintf(tensor->dtype, sizeof tensor->dtype, "%s", dtype);
    tensor->rank = rank;
    tensor->count = 1;
    for (int i = 0; i < rank; i++) {
        tensor->shape[i] = shape[i];
        tensor->count *= shape[i];
    }
    tensor->data = calloc(tensor->count + 1, width_of(dtype));
    return tensor->data != NULL;
}

bool tensor_argument(const Json *arguments, const char *name, const char *dtype, int rank, Tensor *tensor) {
    const Json *reference = json_member(json_member(arguments, name), "tensor");
    const Json *sizes = json_member(reference, "shape");
    size_t shape[LARGEST_RANK];
    int found = json_length(sizes);
    if (!reference || found > LARGEST_RANK || (rank >= 0 && found != rank)) return false;
    if (strcmp(json_text(json_member(reference, "dtype")), dtype) != 0) return false;
    int axis = 0;
    for (const Json *size = sizes->first; size; size = size->next) shape[axis++] = (size_t)json_number(size, 0);
    if (!set_shape(tensor, dtype, found, shape)) return false;
    FILE *file = fopen(json_text(json_member(reference, "file")), "rb");
    bool good = file && fseek(file, (long)json_number(json_member(reference, "offset"), 0), SEEK_SET) == 0 &&
                fread(tensor->data, width_of(dtype), tensor->count, file) == tensor->count;
    if (file) fclose(file);
    if (!good) {
        free(tensor->data);
        tensor->data = NULL;
    }
    return good;
}

bool tensor_result(Tensor *tensor, const char *name, const char *dtype, int rank, const size_t *shape) {
    snprintf(tensor->name, sizeof tensor->name, "%s", name);
    return set_shape(tensor, dtype, rank, shape);
}

bool tensors_write(const char *path, const Tensor *tensors, int count) {
    char header[4096]; /* four results with eight sizes of twenty digits fit */
    size_t offset = 0;
    int length = 0;
    for (int i = 0; i < count; i++) {
        const Tensor *tensor = &tensors[i];
        size_t bytes = tensor->count * width_of(tensor->dtype);
        length += sprintf(header + length, "%c\"%s\":{\"dtype\":\"%s\",\"shape\":[", i ? ',' : '{', tensor->name,
                          stored_dtype(tensor->dtype));
        for (int axis = 0; axis < tensor->rank; axis++)
            length += sprintf(header + length, "%s%zu", axis ? "," : "", tensor->shape[axis]);
        length += sprintf(header + length, "],\"data_offsets\":[%zu,%zu]}", offset, offset + bytes);
        offset += bytes;
    }
    length += sprintf(header + length, "}");
    uint64_t prefix = (uint64_t)length;
    FILE *file = fopen(path, "wb");
    if (!file) return false;
    bool good = fwrite(&prefix, 8, 1, file) == 1 && fwrite(header, (size_t)length, 1, file) == 1;
    for (int i = 0; i < count && good; i++)
        good = fwrite(tensors[i].data, width_of(tensors[i].dtype), tensors[i].count, file) == tensors[i].count;
    return fclose(file) == 0 && good;
}

float bf16_to_float(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &wide, sizeof x);
    return x;
}

uint16_t float_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (isnan(x)) return 0x7FC0;
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
