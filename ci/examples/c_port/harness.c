/* A port in C11 as a process: a command a line on standard input, a reply a line on standard output.
 *
 *     make -C ci/examples/c_port
 *     conformance check cmd:ci/examples/c_port/harness
 */
#define _POSIX_C_SOURCE 200809L

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "port.h"

static const struct { const char *name; Method *method; } METHODS[] = {
    {"quantize_fp8", quantize_fp8},
    {"quantize_fp4_e8m0", quantize_fp4_e8m0},
    {"quantize_fp4_e4m3", quantize_fp4_e4m3},
    {"fake_quantize_fp8", fake_quantize_fp8},
    {"fake_quantize_fp4_e8m0", fake_quantize_fp4_e8m0},
    {"fake_quantize_fp4_e4m3", fake_quantize_fp4_e4m3},
    {"window_indices", window_indices},
    {"window_update", window_update},
    {"candidate_mask", candidate_mask},
    {"engram_layout", engram_layout},
    {"engram_hash", engram_hash},
};
static const size_t METHOD_COUNT = sizeof METHODS / sizeof *METHODS;

void *add_result(Results *results, const char *name, const char *dtype, int rank, const size_t *shape) {
    Tensor *tensor = &results->tensors[results->count];
    if (results->count == MOST_RESULTS || !tensor_result(tensor, name, dtype, rank, shape)) return NULL;
    results->count++;
    return tensor->data;
}

Status refuse(Results *results, const char *why) {
    results->message = why;
    return UNSUPPORTED;
}

long setting(const Json *arguments, const char *name) {
    return (long)json_number(json_member(json_member(json_member(arguments, "config"), "value"), name), -1);
}

static void describe(void) {
    printf(",\"status\":\"ok\",\"description\":{\"name\":\"C example\",\"version\":\"1.0\",\"language\":\"C11\"");
    printf(",\"methods\":[");
    for (size_t i = 0; i < METHOD_COUNT; i++) printf("%s\"%s\"", i ? "," : "", METHODS[i].name);
    printf("]}");
}

static Status call(const Json *request, Results *results) {
    const char *name = json_text(json_member(request, "method"));
    if (strcmp(json_text(json_member(request, "kind")), "call") != 0) return refuse(results, "no stateful objects");
    for (size_t i = 0; i < METHOD_COUNT; i++)
        if (strcmp(METHODS[i].name, name) == 0) return METHODS[i].method(json_member(request, "arguments"), results);
    return refuse(results, "not implemented");
}

static void run(const Json *message) {
    static const char *const statuses[] = {"ok", "unsupported", "error"};
    const Json *request = json_member(message, "request");
    Results results = {.message = ""};
    Status status = OK;
    /* There are no objects that a reset would have to forget. */
    if (strcmp(json_text(json_member(request, "kind")), "reset") != 0) {
        status = call(request, &results);
        if (status == FAILED) results.message = "out of memory";
        const char *path = json_text(json_member(message, "results"));
        if (status == OK && !tensors_write(path, results.tensors, results.count)) {
            status = FAILED;
            results.message = "the results cannot be written";
        }
    }
    printf(",\"status\":\"%s\",\"message\":\"%s\",\"results\":{", statuses[status], results.message);
    for (int i = 0; i < results.count; i++) {
        const Tensor *tensor = &results.tensors[i];
        if (status == OK) printf("%s\"%s\":{\"dtype\":\"%s\"}", i ? "," : "", tensor->name, tensor->dtype);
        free(tensor->data);
    }
    printf("}");
}

int main(void) {
    char *line = NULL;
    size_t room = 0;
    bool stopped = false;
    while (!stopped && getline(&line, &room, stdin) > 0) {
        Json *message = json_parse(line);
        const char *command = json_text(json_member(message, "command"));
        printf("{\"seq\":%.0f", json_number(json_member(message, "seq"), -1));
        if (!message)
            printf(",\"status\":\"error\",\"message\":\"not JSON\"");
        else if (strcmp(command, "describe") == 0)
            describe();
        else if (strcmp(command, "run") == 0)
            run(message);
        else
            printf(",\"status\":\"ok\"");
        printf("}\n");
        fflush(stdout);
        stopped = strcmp(command, "stop") == 0;
        json_free(message);
    }
    free(line);
    return 0;
}
