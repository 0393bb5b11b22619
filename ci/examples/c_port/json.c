/* A JSON parser in a page: recursive descent, no numbers beyond double. */
#include "json.h"

#include <stdlib.h>
#include <string.h>

enum { DEEPEST = 64 };

static Json *parse_value(const char **at, int depth);

static void skip_blanks(const char **at) {
    while (**at == ' ' || **at == '\t' || **at == '\n' || **at == '\r') ++*at;
}

static bool accept(const char **at, char wanted) {
    skip_blanks(at);
    if (**at != wanted) return false;
    ++*at;
    return true;
}

static bool parse_hex(const char **at, unsigned *code) {
    *code = 0;
    for (int i = 0; i < 4; i++, ++*at) {
        char c = **at;
        static const char digits[] = "0123456789abcdefABCDEF";
        const char *found = c ? strchr(digits, c) : NULL;
        if (!found) return false;
        long digit = found - digits;
        *code = *code * 16 + (unsigned)(digit < 16 ? digit : digit - 6);
    }
    return true;
}

static char *append_utf8(char *out, unsigned code) {
    if (code < 0x80) {
        *out++ = (char)code;
    } else if (code < 0x800) {
        *out++ = (char)(0xC0 | code >> 6);
        *out++ = (char)(0x80 | (code & 0x3F));
    } else if (code < 0x10000) {
        *out++ = (char)(0xE0 | code >> 12);
        *out++ = (char)(0x80 | (code >> 6 & 0x3F));
        *out++ = (char)(0x80 | (code & 0x3F));
    } else {
        *out++ = (char)(0xF0 | code >> 18);
        *out++ = (char)(0x80 | (code >> 12 & 0x3F));
        *out++ = (char)(0x80 | (code >> 6 & 0x3F));
        *out++ = (char)(0x80 | (code & 0x3F));
    }
    return out;
}

static bool parse_escape(const char **at, char **out) {
    static const char letters[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
    char letter = *(*at)++;
    if (letter == 'u') {
        unsigned code, low;
        if (!parse_hex(at, &code)) return false;
        if (code >= 0xD800 && code < 0xDC00) { /* the first half of a pair */
            if ((*at)[0] != '\\' || (*at)[1] != 'u') return false;
            *at += 2;
            if (!parse_hex(at, &low)) return false;
            code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
        }
        *out = append_utf8(*out, code);
        return true;
    }
    const char *found = letter ? strchr(letters, letter) : NULL;
    if (!found) return false;
    *(*out)++ = meanings[found - letters];
    return true;
}

static char *parse_text(const char **at) {
    if (!accept(at, '"')) return NULL;
    char *text = malloc(strlen(*at) + 1), *out = text; /* escapes only get shorter */
    while (text && **at != '"') {
        bool good = **at != '\0';
        if (good && **at == '\\') {
            ++*at;
            good = parse_escape(at, &out);
        } else if (good) {
            *out++ = *(*at)++;
        }
        if (!good) {
            free(text);
            return NULL;
        }
    }
    if (text) {
        ++*at;
        *out = '\0';
    }
    return text;
}

static bool parse_members(const char **at, Json *parent, int depth) {
    char end = parent->type == JSON_OBJECT ? '}' : ']';
    if (accept(at, end)) return true;
    Json **place = &parent->first;
    do {
        char *key = NULL;
        if (parent->type == JSON_OBJECT) {
            key = parse_text(at);
            if (!key || !accept(at, ':')) {
                free(key);
                return false;
            }
        }
        *place = parse_value(at, depth + 1);
        if (!*place) {
            free(key);
            return false;
        }
        (*place)->key = key;
        place = &(*place)->next;
    } while (accept(at, ','));
    return accept(at, end);
}

static Json *parse_value(const char **at, int depth) {
    static const struct {
        const char *word;
        JsonType type;
    } words[] = {{"null", JSON_NULL}, {"false", JSON_FALSE}, {"true", JSON_TRUE}};
    Json *value = depth > DEEPEST ? NULL : calloc(1, sizeof *value);
    if (!value) return NULL;
    skip_blanks(at);
    bool good = false;
    if (**at == '{' || **at == '[') {
        value->type = *(*at)++ == '{' ? JSON_OBJECT : JSON_ARRAY;
        good = parse_members(at, value, depth);
    } else if (**at == '"') {
        value->type = JSON_STRING;
        value->text = parse_text(at);
        good = value->text != NULL;
    } else {
        for (size_t i = 0; i < 3 && !good; i++) {
            good = strncmp(*at, words[i].word, strlen(words[i].word)) == 0;
            if (good) {
                value->type = words[i].type;
                *at += strlen(words[i].word);
            }
        }
        if (!good) {
            char *end;
            value->type = JSON_NUMBER;
            value->number = strtod(*at, &end);
            good = end != *at;
            *at = end;
        }
    }
    if (good) return value;
    json_free(value);
    return NULL;
}

Json *json_parse(const char *text) {
    Json *value = parse_value(&text, 0);
    skip_blanks(&text);
    if (value && *text == '\0') return value;
    json_free(value);
    return NULL;
}

void json_free(Json *value) {
    while (value) {
        Json *next = value->next;
        json_free(value->first);
        free(value->text);
        free(value->key);
        free(value);
        value = next;
    }
}

const Json *json_member(const Json *object, const char *key) {
    if (!object || object->type != JSON_OBJECT) return NULL;
    for (const Json *member = object->first; member; member = member->next)
        if (strcmp(member->key, key) == 0) return member;
    return NULL;
}

const char *json_text(const Json *value) { return value && value->type == JSON_STRING ? value->text : ""; }

double json_number(const Json *value, double otherwise) {
    return value && value->type == JSON_NUMBER ? value->number : otherwise;
}

int json_length(const Json *array) {
    int length = 0;
    for (const Json *entry = array ? array->first : NULL; entry; entry = entry->next) length++;
    return length;
}
