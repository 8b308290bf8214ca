/* A fake CUPTI with the functions that supertuner/memory/telemetry/cupti.py uses: unified-memory counters by the
 * activity API.
 *
 * A test reports events with fakecupti_record(); records are collected in a buffer of the client, as in CUPTI, and
 * delivered from a thread of the library when the buffer is full or flushed.
 *
 *   FAKECUPTI_VERSION    the API version; records grew by 40 bytes with version 26 (CUDA 12.8)
 *   FAKECUPTI_CONFIGURE  the code that configuring the counters returns, such as 29: not supported on this device */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;
enum { SUCCESS = 0, INVALID_KIND = 21, UM_PROFILING_NOT_SUPPORTED_ON_DEVICE = 29, UNKNOWN = 999 };
enum { KIND_UNIFIED_MEMORY_COUNTER = 25 };

typedef void (*Requested)(uint8_t **buffer, size_t *size, size_t *most_records);
typedef void (*Completed)(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid);

typedef struct { uint32_t scope, kind, device, enable; } Config;

/* CUpti_ActivityUnifiedMemoryCounter2, and the fields that version 3 appended. */
typedef struct {
    uint32_t kind, counter;
    uint64_t value, start, end, address;
    uint32_t source, target, stream, process, flags, pad;
    uint64_t processors[5];
} Record;

static Requested requested;
static Completed completed;
static uint8_t *buffer;
static size_t size, used;
static uint32_t counters; /* bit n: counter kind n was configured */
static int enabled, record_kind = KIND_UNIFIED_MEMORY_COUNTER;

static uint32_t number(const char *name, uint32_t otherwise)
{
    const char *text = getenv(name);
    return text == NULL ? otherwise : (uint32_t)strtoul(text, NULL, 10);
}

static size_t record_size(void)
{
    return number("FAKECUPTI_VERSION", 130001) < 26 ? sizeof(Record) - 40 : sizeof(Record);
}

Result cuptiGetVersion(uint32_t *version)
{
    *version = number("FAKECUPTI_VERSION", 130001);
    return SUCCESS;
}

Result cuptiGetResultString(Result code, const char **text)
{
    *text = code == UM_PROFILING_NOT_SUPPORTED_ON_DEVICE ? "CUPTI_ERROR_UM_PROFILING_NOT_SUPPORTED_ON_DEVICE"
                                                         : "CUPTI_ERROR_UNKNOWN";
    return SUCCESS;
}

Result cuptiActivityRegisterCallbacks(Requested on_request, Completed on_complete)
{
    requested = on_request;
    completed = on_complete;
    return SUCCESS;
}

Result cuptiActivityConfigureUnifiedMemoryCounter(Config *configs, uint32_t n)
{
    Result refusal = (Result)number("FAKECUPTI_CONFIGURE", SUCCESS);
    if (refusal != SUCCESS)
        return refusal;
    for (uint32_t i = 0; i < n; i++)
        if (configs[i].enable)
            counters |= 1u << configs[i].kind;
    return SUCCESS;
}

Result cuptiActivityEnable(uint32_t kind)
{
    if (kind != KIND_UNIFIED_MEMORY_COUNTER)
        return INVALID_KIND;
    enabled = 1;
    return SUCCESS;
}

Result cuptiActivityDisable(uint32_t kind)
{
    if (kind != KIND_UNIFIED_MEMORY_COUNTER)
        return INVALID_KIND;
    enabled = 0;
    return SUCCESS;
}

static void *deliver(void *unused)
{
    (void)unused;
    completed(NULL, 0, buffer, size, used);
    return NULL;
}

Result cuptiActivityFlushAll(uint32_t flag)
{
    (void)flag;
    if (buffer == NULL)
        return SUCCESS;
    pthread_t worker;
    if (pthread_create(&worker, NULL, deliver, NULL) != 0)
        return UNKNOWN;
    pthread_join(worker, NULL);
    buffer = NULL;
    used = 0;
    return SUCCESS;
}

/* --- Functions for tests
 * ------------------------------------------------------------------------------------------- */

/* The next records have another activity kind, as if another client had enabled it. */
void fakecupti_kind(int kind) { record_kind = kind; }

/* One event of a counter. Returns whether it was recorded: it is lost if the counter is off or there is no buffer. */
int fakecupti_record(uint32_t counter, uint64_t value)
{
    if (!enabled || !(counters & 1u << counter))
        return 0;
    if (buffer == NULL) {
        size_t most = 0;
        requested(&buffer, &size, &most);
        if (buffer == NULL || size < record_size()) {
            buffer = NULL;
            return 0;
        }
    }
    Record record = {.kind = (uint32_t)record_kind, .counter = counter, .value = value};
    memcpy(buffer + used, &record, record_size());
    used += record_size();
    if (used + record_size() > size)
        cuptiActivityFlushAll(0);
    return 1;
}
