/* The overflow allocator: a plugin of PyTorch's caching allocator that gives device memory while there is some, and
 * managed memory from then on, up to hard limits; beyond them it gives NULL, which torch raises as OutOfMemoryError.
 *
 * Stages. In stage 1 a segment is device memory, as long as `reserve` bytes of the GPU stay free after it. The first
 * that does not fit so begins stage 2: managed memory, which the driver moves between GPU and host. Stage 2 ends when
 * `reserve` and a margin of 5 % of the GPU are free again; inside the margin nothing changes. What is refused changes
 * nothing either.
 *
 * Threads. One mutex guards everything, and is never held across a call of the driver: allocating may wait for the GPU
 * and freeing always does, and neither another device nor whoever asks for statistics should wait with it. Bytes are
 * booked before the driver is asked and given back if it says no, so limits hold exactly, whoever comes at once. (Two
 * threads could count the same free GPU memory, and dip into the reserve; torch's own lock keeps them apart.)
 *
 * Fork. CUDA does not survive it: a child of a process that used this library gets NULL, and its frees do nothing.
 *
 * Whoever loads this library keeps it loaded: torch frees through it to the end. overflow.py mirrors the statistics. */
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
    int32_t stage, last_error; /* stage 0: nothing was asked for yet; last_error: the driver's, or -1 for our own */
    char last_call[32];
    uint64_t total_bytes, free_bytes, reserve_bytes, margin_bytes, limit_bytes; /* of the GPU; free: when last asked */
    uint64_t bytes[2], peak_bytes[2], segments[2], allocations[2];              /* by kind: device, managed */
    uint64_t entered, left, frees, foreign_frees;
    uint64_t refused_ratio, refused_host, refused_driver, device_failures, advice_failures, free_failures;
    uint64_t light_reclamations, hard_reclamations;           /* told by Python, which does them */
    uint64_t host_floor_bytes, host_room_bytes, host_looks; /* the same for all devices */
};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static atomic_int forked;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* guards what follows, the segments and the host */
static struct state {
    struct statistics said;
    context context;
    double ratio;     /* 0: not set, 5 is meant */
    uint64_t reserve; /* one more than what was set; 0: not set, as much as the margin is meant */
} states[MAX_DEVICES];

static void lock(void) { pthread_mutex_lock(&mutex); }
static void unlock(void) { pthread_mutex_unlock(&mutex); }

/* ---- the account: under the mutex, without the driver ---- */

static enum kind failed(struct state *state, const char *call, int code, uint64_t *count)
{
    state->said.last_error = code;
    strncpy(state->said.last_call, call, sizeof state->said.last_call - 1);
    ++*count;
    return REFUSED;
}

static int stage_with(const struct statistics *said, int64_t left) /* left: free after what is being asked for */
{
    uint64_t needed = said->reserve_bytes + (said->stage == 2 ? said->margin_bytes : 0);
    return left < (int64_t)needed ? 2 : 1;
}

static void go_to(struct statistics *said, int stage)
{
    said->entered += stage == 2 && said->stage != 2;
    said->left += stage == 1 && said->stage == 2;
    said->stage = stage;
}

static void account(struct state *state, const struct segment *segment, int sign)
{
    state->said.bytes[segment->kind] += sign * segment->bytes;
    if (segment->kind == MANAGED)
        hand_out(sign * segment->bytes);
}

static enum kind book_as(struct state *state, struct segment *segment, enum kind kind)
{
    if (kind == MANAGED && !host_allows(segment->bytes)) {
        state->said.refused_host++;
        return REFUSED;
    }
    segment->kind = kind;
    account(state, segment, 1);
    return kind;
}

/* Decide what a segment will be, and count it as if the driver had given it. */
static enum kind book(struct state *state, struct segment *segment, uint64_t free_bytes, uint64_t total)
{
    struct statistics *said = &state->said;
    said->free_bytes = free_bytes;
    said->total_bytes = total;
    said->margin_bytes = (uint64_t)(MARGIN * (double)total);
    said->reserve_bytes = state->reserve ? state->reserve - 1 : said->margin_bytes;
    if (said->reserve_bytes > total)
        said->reserve_bytes = total;
    said->limit_bytes = (uint64_t)((state->ratio > 0 ? state->ratio : 5.0) * (double)total);
    if (said->bytes[DEVICE] + said->bytes[MANAGED] + segment->bytes > said->limit_bytes) {
        said->refused_ratio++;
        return REFUSED;
    }
    int stage = stage_with(said, (int64_t)(free_bytes - segment->bytes));
    enum kind kind = book_as(state, segment, stage == 1 ? DEVICE : MANAGED);
    if (kind != REFUSED)
        go_to(said, stage);
    return kind;
}

/* Free memory said otherwise: it is in pieces, or another process was faster. Managed memory may still do. */
static enum kind book_instead(struct state *state, struct segment *segment, int code)
{
    failed(state, "cuMemAlloc", code, &state->said.device_failures);
    account(state, segment, -1);
    return book_as(state, segment, MANAGED);
}

/* ---- acts: with the driver, without the mutex ---- */

static void in_child(void)
{
    atomic_store(&forked, 1);
    unlock();
}

static void load_once(void)
{
    load();
    pthread_atfork(lock, unlock, in_child); /* so that a child never sees the account half written */
}

/* Make the device's context current; 0, or what went wrong, which is counted there. */
static int enter_counting(int device, struct contexts *contexts, uint64_t *count)
{
    pthread_once(&once, load_once);
    const char *call = "fork";
    int code = atomic_load(&forked) ? -1 : enter(&states[device].context, device, contexts, &call);
    if (code) {
        lock();
        failed(&states[device], call, code, count);
        unlock();
    }
    return code;
}

/* gpu_first: pages live on the GPU and come back to it on use. balanced: mapped for the GPU wherever they are, moved by
 * the driver's own counters. cpu_first: they live on the host, and the GPU reads them over the link. */
static int advise_as(const struct segment *segment, enum pattern pattern)
{
    struct location gpu = {AT_DEVICE, segment->device}, home = {AT_HOST, 0}, lives = pattern == GPU_FIRST ? gpu : home;
    int first = pattern == BALANCED ? 0 : advise(segment->address, segment->bytes, PREFERRED_LOCATION, lives);
    int second = pattern == GPU_FIRST ? 0 : advise(segment->address, segment->bytes, ACCESSED_BY, gpu);
    return first ? first : second;
}

/* Fill in the segment; 0: refused, and nothing of it is left in the account. */
static int obtain(struct state *state, struct segment *segment, enum pattern pattern)
{
    struct statistics *said = &state->said;
    size_t free_bytes = 0, total = 0;
    int code = cuda.info(&free_bytes, &total), advice = 0;
    lock();
    enum kind kind = code ? failed(state, "cuMemGetInfo", code, &said->refused_driver)
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
        failed(state, "cuMemAdvise", advice, &said->advice_failures);
    if (code) {
        failed(state, "cuMemAllocManaged", code, &said->refused_driver);
        account(state, segment, -1);
    } else {
        put(segment);
        said->segments[kind]++;
        said->allocations[kind]++;
        if (said->bytes[kind] > said->peak_bytes[kind])
            said->peak_bytes[kind] = said->bytes[kind];
    }
    unlock();
    return !code;
}

static void *allocate(ssize_t asked, int device, enum pattern pattern)
{
    struct contexts contexts;
    if (asked <= 0 || device < 0 || device >= MAX_DEVICES)
        return NULL;
    struct state *state = &states[device];
    struct segment *segment = calloc(1, sizeof *segment); /* first: once there is memory, nothing here can fail */
    if (!segment || enter_counting(device, &contexts, &state->said.refused_driver)) {
        free(segment);
        return NULL;
    }
    segment->bytes = (uint64_t)asked, segment->device = device;
    int given = obtain(state, segment, pattern);
    void *address = given ? (void *)segment->address : NULL;
    if (!given)
        free(segment);
    leave(contexts);
    return address;
}

/* ---- what torch calls: one entry for each access pattern, so that pools of different patterns share one account ---- */

#define ALLOC(name, pattern) \
    EXPORT void *name(ssize_t bytes, int device, void *stream) { (void)stream; return allocate(bytes, device, pattern); }
ALLOC(supertuner_alloc_gpu_first, GPU_FIRST)
ALLOC(supertuner_alloc_balanced, BALANCED)
ALLOC(supertuner_alloc_cpu_first, CPU_FIRST)

/* What the driver does not take back stays in the account, and may be freed again. */
EXPORT void supertuner_free(void *address, size_t asked, int device, void *stream)
{
    (void)asked, (void)stream; /* what was noted here is surer: the size, and the device too */
    if (!address || device < 0 || device >= MAX_DEVICES)
        return;
    lock();
    struct segment *segment = take((uint64_t)address); /* before the driver may give the address to another thread */
    struct state *state = &states[segment ? segment->device : device];
    struct statistics *said = &state->said;
    int spilling = said->stage == 2;
    said->foreign_frees += !segment;
    unlock();
    if (!segment)
        return;
    struct contexts contexts;
    size_t free_bytes = 0, total = 0;
    int entered = !enter_counting(segment->device, &contexts, &said->free_failures);
    int code = entered ? cuda.release(segment->address) : -1;
    int known = spilling && !code && !cuda.info(&free_bytes, &total);
    lock();
    if (code) {
        put(segment);
        if (entered)
            failed(state, "cuMemFree", code, &said->free_failures);
    } else {
        account(state, segment, -1);
        said->segments[segment->kind]--;
        said->frees++;
        free(segment);
    }
    if (known && said->stage == 2)
        go_to(said, stage_with(said, (int64_t)(said->free_bytes = free_bytes)));
    unlock();
    if (entered)
        leave(contexts);
}

/* ---- what Python calls ---- */

/* reserve: bytes of the GPU to keep free, UINT64_MAX for as much as the margin. 0, or -1 for what makes no sense. */
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

/* The host's side, for all devices: what to leave free, what may be handed out between two looks, what a container could
 * hold of managed memory (UINT64_MAX: no container), and the file to look at. */
EXPORT void supertuner_overflow_host(uint64_t floor, uint64_t reserve, uint64_t cap, const char *meminfo)
{
    lock();
    host.floor = floor, host.reserve = reserve, host.cap = cap, host.due = 1;
    strncpy(host.meminfo, meminfo, sizeof host.meminfo - 1);
    unlock();
}

EXPORT void supertuner_overflow_reclaimed(int device, uint64_t light, uint64_t hard)
{
    if (device < 0 || device >= MAX_DEVICES)
        return;
    lock();
    states[device].said.light_reclamations += light;
    states[device].said.hard_reclamations += hard;
    unlock();
}

EXPORT int supertuner_overflow_kind(const void *address) /* of a live segment: 0 device, 1 managed; -1: not ours */
{
    lock();
    struct segment *found = *place_of((uint64_t)address);
    int kind = found ? found->kind : REFUSED;
    unlock();
    return kind;
}

EXPORT int supertuner_overflow_statistics(int device, struct statistics *out, size_t size)
{
    if (device < 0 || device >= MAX_DEVICES || size != sizeof *out)
        return -1;
    lock();
    *out = states[device].said;
    out->version = STATISTICS_VERSION, out->size = sizeof *out;
    out->host_floor_bytes = host.floor, out->host_room_bytes = host.room, out->host_looks = host.looks;
    unlock();
    return 0;
}
