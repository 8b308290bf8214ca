/* The overflow allocator: a plugin of PyTorch's caching allocator. It allocates device memory while there is enough,
 * then managed memory up to hard limits. Beyond these it returns NULL, which torch raises as OutOfMemoryError.
 *
 * Stages. In stage 1 a segment is device memory, as long as `reserve` bytes of the GPU stay free after it. The first
 * segment that does not fit begins stage 2: managed memory, which the driver migrates between GPU and host. Stage 2
 * ends when `reserve` plus a margin of 5 % of the GPU is free again; the margin prevents frequent changes between
 * the stages. A refused request changes nothing.
 *
 * Threads. One mutex guards everything, and is never held during a driver call: allocating may wait for the GPU and
 * freeing always does, and neither another device nor a reader of the statistics should wait with it. Bytes are
 * booked before the driver is called and unbooked if it fails, so that limits hold exactly under concurrency. (Two
 * threads could count the same free GPU memory and dip into the reserve; torch's own lock prevents that.)
 *
 * Fork. CUDA does not survive a fork: in a child of a process that used this library, allocations return NULL and
 * frees do nothing.
 *
 * The library must stay loaded, because torch frees memory through it until the process ends. plugin.py mirrors the
 * statistics. */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#include "_overflow_driver.h"
#include "_overflow_host.h"
#include "_overflow_segments.h"

#define EXPORT __attribute__((visibility("default")))
#define STATISTICS_VERSION 1
#define MAX_DEVICES 64
#define MARGIN 0.05 /* of GPU memory, between entering and leaving stage 2 */

enum kind { REFUSED = -1, DEVICE = 0, MANAGED = 1 };
enum pattern { GPU_FIRST, BALANCED, CPU_FIRST };

struct statistics {
    uint32_t version, size;
    int32_t stage, last_error; /* stage 0: no request yet; last_error: the driver's code, or -1 for our own */
    char last_call[32];
    /* of the GPU; free: at the last query */
    uint64_t total_bytes, free_bytes, reserve_bytes, margin_bytes, limit_bytes;
    uint64_t bytes[2], peak_bytes[2], segments[2], allocations[2];              /* by kind: device, managed */
    uint64_t entered, left, frees, foreign_frees;
    uint64_t refused_ratio, refused_host, refused_driver, device_failures, advice_failures, free_failures;
    uint64_t light_reclamations, hard_reclamations;           /* reported by Python, which performs them */
    uint64_t host_floor_bytes, host_room_bytes, host_looks; /* the same for all devices */
};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static atomic_int forked;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* guards everything below, the segments and the host */
static struct state {
    struct statistics stats;
    context context;
    double ratio;     /* 0: not set, means 5 */
    uint64_t reserve; /* one more than the configured value; 0: not set, means the margin */
} states[MAX_DEVICES];

static void lock(void) { pthread_mutex_lock(&mutex); }
static void unlock(void) { pthread_mutex_unlock(&mutex); }

/* ---- bookkeeping: under the mutex, without driver calls ---- */

static enum kind record_failure(struct state *state, const char *call, int code, uint64_t *count)
{
    state->stats.last_error = code;
    strncpy(state->stats.last_call, call, sizeof state->stats.last_call - 1);
    ++*count;
    return REFUSED;
}

static int stage_for(const struct statistics *stats, int64_t left) /* left: free bytes after the requested segment */
{
    uint64_t needed = stats->reserve_bytes + (stats->stage == 2 ? stats->margin_bytes : 0);
    return left < (int64_t)needed ? 2 : 1;
}

static void set_stage(struct statistics *stats, int stage)
{
    stats->entered += stage == 2 && stats->stage != 2;
    stats->left += stage == 1 && stats->stage == 2;
    stats->stage = stage;
}

static void add_bytes(struct state *state, const struct segment *segment, int sign)
{
    state->stats.bytes[segment->kind] += sign * segment->bytes;
    if (segment->kind == MANAGED)
        add_managed_bytes(sign * segment->bytes);
}

static enum kind book_as(struct state *state, struct segment *segment, enum kind kind)
{
    if (kind == MANAGED && !host_allows(segment->bytes)) {
        state->stats.refused_host++;
        return REFUSED;
    }
    segment->kind = kind;
    add_bytes(state, segment, 1);
    return kind;
}

/* Decide the kind of a segment, and book it as if the driver had allocated it. Returns REFUSED beyond a limit. */
static enum kind book(struct state *state, struct segment *segment, uint64_t free_bytes, uint64_t total)
{
    struct statistics *stats = &state->stats;
    stats->free_bytes = free_bytes;
    stats->total_bytes = total;
    stats->margin_bytes = (uint64_t)(MARGIN * (double)total);
    stats->reserve_bytes = state->reserve ? state->reserve - 1 : stats->margin_bytes;
    if (stats->reserve_bytes > total)
        stats->reserve_bytes = total;
    stats->limit_bytes = (uint64_t)((state->ratio > 0 ? state->ratio : 5.0) * (double)total);
    if (stats->bytes[DEVICE] + stats->bytes[MANAGED] + segment->bytes > stats->limit_bytes) {
        stats->refused_ratio++;
        return REFUSED;
    }
    int stage = stage_for(stats, (int64_t)(free_bytes - segment->bytes));
    enum kind kind = book_as(state, segment, stage == 1 ? DEVICE : MANAGED);
    if (kind != REFUSED)
        set_stage(stats, stage);
    return kind;
}

/* The driver failed although it had reported enough free memory: the memory is fragmented, or another process was
 * faster. Book managed memory instead. */
static enum kind book_instead(struct state *state, struct segment *segment, int code)
{
    record_failure(state, "cuMemAlloc", code, &state->stats.device_failures);
    add_bytes(state, segment, -1);
    return book_as(state, segment, MANAGED);
}

/* ---- driver calls: without the mutex ---- */

static void mark_forked(void)
{
    atomic_store(&forked, 1);
    unlock();
}

static void load_once(void)
{
    load_driver();
    pthread_atfork(lock, unlock, mark_forked); /* so that a child never sees half-written bookkeeping */
}

/* Make the device's context current. Returns 0, or the error code, which is counted in `count`. */
static int enter_context_counting(int device, struct contexts *contexts, uint64_t *count)
{
    pthread_once(&once, load_once);
    const char *call = "fork";
    int code = atomic_load(&forked) ? -1 : enter_context(&states[device].context, device, contexts, &call);
    if (code) {
        lock();
        record_failure(&states[device], call, code, count);
        unlock();
    }
    return code;
}

/* Advice per access pattern. gpu_first: the preferred location is the GPU, to which pages return on use. balanced:
 * mapped for the GPU wherever they are, migrated by the driver's access counters. cpu_first: the preferred location
 * is the host, and the GPU reads over the link. */
static int advise_as(const struct segment *segment, enum pattern pattern)
{
    struct location gpu = {AT_DEVICE, segment->device}, home = {AT_HOST, 0}, lives = pattern == GPU_FIRST ? gpu : home;
    int first = pattern == BALANCED ? 0 : advise(segment->address, segment->bytes, PREFERRED_LOCATION, lives);
    int second = pattern == GPU_FIRST ? 0 : advise(segment->address, segment->bytes, ACCESSED_BY, gpu);
    return first ? first : second;
}

/* Allocate the segment. Returns 0 if it was refused; then nothing of it remains booked. */
static int allocate_segment(struct state *state, struct segment *segment, enum pattern pattern)
{
    struct statistics *stats = &state->stats;
    size_t free_bytes = 0, total = 0;
    int code = cuda.info(&free_bytes, &total), advice = 0;
    lock();
    enum kind kind = code ? record_failure(state, "cuMemGetInfo", code, &stats->refused_driver)
                          : book(state, segment, free_bytes, total);
    unlock();
    if (kind == DEVICE && (code = cuda.allocate(&segment->address, segment->bytes))) {
        lock();
        kind = book_instead(state, segment, code);
        unlock();
    }
    if (kind == MANAGED && !(code = cuda.allocate_managed(&segment->address, segment->bytes, ATTACH_GLOBAL)))
        advice = advise_as(segment, pattern);
    if (kind == REFUSED)
        return 0;
    lock();
    if (advice)
        record_failure(state, "cuMemAdvise", advice, &stats->advice_failures);
    if (code) {
        record_failure(state, "cuMemAllocManaged", code, &stats->refused_driver);
        add_bytes(state, segment, -1);
    } else {
        insert_segment(segment);
        stats->segments[kind]++;
        stats->allocations[kind]++;
        if (stats->bytes[kind] > stats->peak_bytes[kind])
            stats->peak_bytes[kind] = stats->bytes[kind];
    }
    unlock();
    return !code;
}

static void *allocate(ssize_t requested_bytes, int device, enum pattern pattern)
{
    struct contexts contexts;
    if (requested_bytes <= 0 || device < 0 || device >= MAX_DEVICES)
        return NULL;
    struct state *state = &states[device];
    /* first, because nothing below may fail once there is GPU memory */
    struct segment *segment = calloc(1, sizeof *segment);
    if (!segment || enter_context_counting(device, &contexts, &state->stats.refused_driver)) {
        free(segment);
        return NULL;
    }
    segment->bytes = (uint64_t)requested_bytes, segment->device = device;
    int allocated = allocate_segment(state, segment, pattern);
    void *address = allocated ? (void *)segment->address : NULL;
    if (!allocated)
        free(segment);
    leave_context(contexts);
    return address;
}

/* ---- called by torch: one entry per access pattern, so that pools of different patterns share one account ---- */

#define ALLOC(name, pattern) \
    EXPORT void *name(ssize_t bytes, int device, void *stream) { (void)stream; return allocate(bytes, device, pattern); }
ALLOC(supertuner_alloc_gpu_first, GPU_FIRST)
ALLOC(supertuner_alloc_balanced, BALANCED)
ALLOC(supertuner_alloc_cpu_first, CPU_FIRST)

/* A segment that the driver fails to free stays booked, and may be freed again. */
EXPORT void supertuner_free(void *address, size_t nbytes, int device, void *stream)
{
    (void)nbytes, (void)stream; /* the size and device recorded here are more reliable */
    if (!address || device < 0 || device >= MAX_DEVICES)
        return;
    lock();
    struct segment *segment = remove_segment((uint64_t)address); /* before the driver can reuse the address for another thread */
    struct state *state = &states[segment ? segment->device : device];
    struct statistics *stats = &state->stats;
    int spilling = stats->stage == 2;
    stats->foreign_frees += !segment;
    unlock();
    if (!segment)
        return;
    struct contexts contexts;
    size_t free_bytes = 0, total = 0;
    int entered = !enter_context_counting(segment->device, &contexts, &stats->free_failures);
    int code = entered ? cuda.release(segment->address) : -1;
    int known = spilling && !code && !cuda.info(&free_bytes, &total);
    lock();
    if (code) {
        insert_segment(segment);
        if (entered)
            record_failure(state, "cuMemFree", code, &stats->free_failures);
    } else {
        add_bytes(state, segment, -1);
        stats->segments[segment->kind]--;
        stats->frees++;
        free(segment);
    }
    if (known && stats->stage == 2)
        set_stage(stats, stage_for(stats, (int64_t)(stats->free_bytes = free_bytes)));
    unlock();
    if (entered)
        leave_context(contexts);
}

/* ---- called by Python ---- */

/* reserve: GPU bytes to keep free; UINT64_MAX: as many as the margin. Returns 0, or -1 for invalid arguments. */
EXPORT int supertuner_overflow_configure(int device, double ratio, uint64_t reserve)
{
    if (device < 0 || device >= MAX_DEVICES || !(ratio >= 1 && ratio <= 1e6))
        return -1;
    lock();
    states[device].ratio = ratio;
    states[device].reserve = reserve + 1;
    unlock();
    return 0;
}

/* Limits of host memory, for all devices: bytes to keep free, bytes that may be allocated between two readings,
 * managed bytes that a container could hold (UINT64_MAX: no container), and the file to read. */
EXPORT void supertuner_overflow_host(uint64_t floor, uint64_t reserve, uint64_t cap, const char *meminfo)
{
    lock();
    host.floor = floor, host.reserve = reserve, host.cap = cap, host.stale = 1;
    strncpy(host.meminfo, meminfo, sizeof host.meminfo - 1);
    unlock();
}

EXPORT void supertuner_overflow_reclaimed(int device, uint64_t light, uint64_t hard)
{
    if (device < 0 || device >= MAX_DEVICES)
        return;
    lock();
    states[device].stats.light_reclamations += light;
    states[device].stats.hard_reclamations += hard;
    unlock();
}

EXPORT int supertuner_overflow_kind(const void *address) /* kind of a live segment: 0 device, 1 managed; -1: not ours */
{
    lock();
    struct segment *found = *find_link((uint64_t)address);
    int kind = found ? found->kind : REFUSED;
    unlock();
    return kind;
}

EXPORT int supertuner_overflow_statistics(int device, struct statistics *out, size_t size)
{
    if (device < 0 || device >= MAX_DEVICES || size != sizeof *out)
        return -1;
    lock();
    *out = states[device].stats;
    out->version = STATISTICS_VERSION, out->size = sizeof *out;
    out->host_floor_bytes = host.floor, out->host_room_bytes = host.room, out->host_looks = host.readings;
    unlock();
    return 0;
}
