/* Every driver call passes through here: it checks whether the driver is initialised, whether the process has
 * forked, and whether a test injected an error. Calls are counted by name; with FAKECUDA_LOG=file each writes one
 * line "name arguments -> result". */
#include "fake.h"

#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct call {
    struct call *next;
    char name[48];
    atomic_long count;
    long fail_from, fail_times; /* fails when fail_from <= count < fail_from + fail_times; times 0: forever */
    CUresult fail_code;         /* OK: does not fail */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct call *all;
static atomic_bool initialised, forked;
static int log_file = -1;

static void in_the_child(void) { forked = true; }

static struct call *named(const char *name) {
    size_t length = strlen(name);
    if (length > 3 && (!strcmp(name + length - 3, "_v2") || !strcmp(name + length - 3, "_v3"))) length -= 3;
    pthread_mutex_lock(&lock);
    struct call *call = all;
    while (call && (strncmp(call->name, name, length) || call->name[length])) call = call->next;
    if (!call) {
        call = calloc(1, sizeof *call);
        if (!call || length >= sizeof call->name) abort();
        memcpy(call->name, name, length);
        call->next = all;
        all = call;
    }
    pthread_mutex_unlock(&lock);
    return call;
}

/* FAKECUDA_FAULTS="cuMemPrefetchAsync=1@2x3,cuMemAlloc=2": code 1 from the second call on, three times; code 2 always. */
static void read_faults(const char *text) {
    char *copy = strdup(text), *rest = copy;
    for (char *item; (item = strsep(&rest, ","));) {
        char name[48];
        int code = 0;
        long from = 1, times = 0;
        if (sscanf(item, "%47[^=]=%d@%ldx%ld", name, &code, &from, &times) == 2) sscanf(item, "%*[^=]=%*dx%ld", &times);
        if (code) call_fault(name, code, from, times);
    }
    free(copy);
}

__attribute__((constructor)) static void open_log(void) {
    const char *path = getenv("FAKECUDA_LOG"), *faults = getenv("FAKECUDA_FAULTS");
    if (path) log_file = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    if (faults) read_faults(faults);
    pthread_atfork(NULL, NULL, in_the_child);
}

CUresult call_begin(struct call *_Atomic *slot, const char *name, bool needs_init) {
    struct call *call = *slot;
    if (!call) *slot = call = named(name);
    long count = ++call->count;
    if (call->fail_code && count >= call->fail_from && (!call->fail_times || count < call->fail_from + call->fail_times))
        return call->fail_code;
    /* After a fork the driver in the child returns only this error. */
    if (forked || (needs_init && !initialised)) return NOT_INITIALIZED;
    return OK;
}

CUresult call_end(struct call *call, CUresult result, const char *format, ...) {
    if (log_file < 0) return result;
    char line[256];
    int length = snprintf(line, sizeof line, "%s ", call->name);
    va_list arguments;
    va_start(arguments, format);
    length += vsnprintf(line + length, sizeof line - 32 - (size_t)length, format, arguments);
    va_end(arguments);
    length += snprintf(line + length, sizeof line - (size_t)length, " -> %d\n", result);
    if (write(log_file, line, (size_t)length) != length) abort(); /* an incomplete log would prove nothing */
    return result;
}

/* A line of the runtime, in order with the driver's lines: copies and launches do not pass through here. */
API void fakecuda_said(const char *format, ...) {
    if (log_file < 0) return;
    char line[256];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof line - 1, format, arguments);
    va_end(arguments);
    line[length++] = '\n';
    if (write(log_file, line, (size_t)length) != length) abort();
}

long call_count(const char *name) { return named(name)->count; }

/* `from` counts from now on: 1 is the next call. */
void call_fault(const char *name, CUresult code, long from, long times) {
    struct call *call = named(name);
    call->fail_from = call->count + from;
    call->fail_times = times;
    call->fail_code = code;
}

void calls_reset(void) {
    pthread_mutex_lock(&lock);
    for (struct call *call = all; call; call = call->next) {
        call->fail_code = OK;
        call->count = 0;
    }
    pthread_mutex_unlock(&lock);
}

void calls_initialised(void) { initialised = true; }
