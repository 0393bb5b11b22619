/* JSON as a tree. */
#ifndef JSON_H
#define JSON_H

#include <stdbool.h>

typedef enum { JSON_NULL, JSON_FALSE, JSON_TRUE, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT } JsonType;

typedef struct Json {
    JsonType type;
    double number;
    char *text;          /* of a string */
    char *key;           /* name of a member of an object */
    struct Json *first;  /* of an array or object */
    struct Json *next;   /* in the array or object that this belongs to */
} Json;

/* NULL where the text is not JSON. */
Json *json_parse(const char *text);
void json_free(Json *value);

/* All of these accept NULL, so that look-ups can be chained. */
const Json *json_member(const Json *object, const char *key);
const char *json_text(const Json *value);
double json_number(const Json *value, double otherwise);
int json_length(const Json *array);

#endif
