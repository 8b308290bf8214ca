/* The overflow allocator: a plugin of PyTorch's caching allocator that gives device memory while there is some, and
 * managed memory from then on, up to hard limits; beyond them it gives NULL, which torch raises as OutOfMemoryError.
 *
 * Stages. In stage 1 a segment is device memory, as long as `reserve` bytes of the GPU stay free after it. The first
 * that does not fit so begins stage 2: managed memory, which the driver moves between GPU and host. Stage 2 ends when
 * `reserve` and a margin of 5 % of the GPU are free again; inside the margin nothing changes.
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
    void *context;
    double ratio;     /* 0: not set, 5 is meant */
    uint64_t reserve; /* one more than what was set; 0: not set, as much as the margin is meant */
} states[MAX_DEVICES];

/* ---- decisions: under the mutex, without the driver ---- */

static enum kind failed(struct state *state, const char *call, int code, uint64_t *count)
{
    state->said.last_error = code;
    strncpy(state->said.last_call, call, sizeof state->said.last_call - 1);
    ++*count;
    return REFUSED;
}

static void restage(struct statistics *said, int64_t left) /* left: free after what is being asked for */
{
    if (said->stage != 2 && left < (int64_t)said->reserve_bytes) {
        said->stage = 2;
        said->entered++;
    } else if (said->stage == 2 && left >= (int64_t)(said->reserve_bytes + said->margin_bytes)) {
        said->stage = 1;
        said->left++;
    } else if (!said->stage) {
        said->stage = 1;
    }
}

static void account(struct state *state, enum kind kind, uint64_t bytes, int sign)
{
    struct statistics *said = &state->said;
    said->bytes[kind] += sign * bytes;
    if (said->bytes[kind] > said->peak_bytes[kind])
        said->peak_bytes[kind] = said->bytes[kind];
    if (kind == MANAGED)
        hand_out(sign * bytes);
}

static enum kind book_as(struct state *state, enum kind kind, uint64_t bytes)
{
    if (kind == MANAGED && !host_allows(bytes)) {
        state->said.refused_host++;
        unbook_slot();
        return REFUSED;
    }
    account(state, kind, bytes, 1);
    return kind;
}

/* Decide what a segment will be, and count it as if the driver had given it. */
static enum kind book(struct state *state, uint64_t bytes, uint64_t free_bytes, uint64_t total)
{
    struct statistics *said = &state->said;
    said->free_bytes = free_bytes;
    said->total_bytes = total;
    said->margin_bytes = (uint64_t)(MARGIN * (double)total);
    said->reserve_bytes = state->reserve ? state->reserve - 1 : said->margin_bytes;
    said->limit_bytes = (uint64_t)((state->ratio > 0 ? state->ratio : 5.0) * (double)total);
    if (said->bytes[DEVICE] + said->bytes[MANAGED] + bytes > said->limit_bytes) {
        said->refused_ratio++;
        return REFUSED;
    }
    if (!book_slot())
        return failed(state, "calloc", -1, &said->refused_driver);
    restage(said, (int64_t)(free_bytes - bytes));
    return book_as(state, said->stage == 1 ? DEVICE : MANAGED, bytes);
}

/* Free memory said otherwise: it is in pieces, or another process was faster. Managed memory may still do. */
static enum kind book_instead(struct state *state, uint64_t bytes, int code)
{
    failed(state, "cuMemAlloc", code, &state->said.device_failures);
    account(state, DEVICE, bytes, -1);
    return book_as(state, MANAGED, bytes);
}

/* ---- acts: with the driver, without the mutex ---- */

static void in_child(void)
{
    atomic_store(&forked, 1);
    pthread_mutex_init(&mutex, NULL); /* a thread of the parent may have held it, and is not here to let go */
}

static void load_once(void)
{
    load();
    pthread_atfork(NULL, NULL, in_child);
}

struct contexts { void *ours, *before; };

/* Make the device's primary context, which is torch's too, current. */
static int enter(struct state *state, int device, struct contexts *contexts)
{
    pthread_once(&once, load_once);
    int handle = 0, code = atomic_load(&forked) ? -1 : load_error;
    const char *call = atomic_load(&forked) ? "fork" : load_call;
    pthread_mutex_lock(&mutex);
    contexts->ours = state->context;
    pthread_mutex_unlock(&mutex);
    if (!code && !contexts->ours && !(code = cuda.device(&handle, device)))
        code = cuda.retain(&contexts->ours, handle), call = "cuDevicePrimaryCtxRetain";
    if (!code && !(code = cuda.current(&contexts->before)) && contexts->before != contexts->ours)
        code = cuda.make_current(contexts->ours), call = "cuCtxSetCurrent";
    pthread_mutex_lock(&mutex);
    if (code)
        failed(state, call, code, &state->said.refused_driver);
    else
        state->context = contexts->ours;
    pthread_mutex_unlock(&mutex);
    return !code;
}

static void leave(struct contexts contexts)
{
    if (contexts.before != contexts.ours)
        cuda.make_current(contexts.before);
}

/* gpu_first: pages live on the GPU and come back to it on use. balanced: mapped for the GPU wherever they are, moved by
 * the driver's own counters. cpu_first: they live on the host, and the GPU reads them over the link. */
static int advise_as(struct segment segment, enum pattern pattern)
{
    struct location gpu = {AT_DEVICE, segment.device}, home = {AT_HOST, 0}, lives = pattern == GPU_FIRST ? gpu : home;
    int first = pattern == BALANCED ? 0 : advise(segment.address, segment.bytes, PREFERRED_LOCATION, lives);
    int second = pattern == GPU_FIRST ? 0 : advise(segment.address, segment.bytes, ACCESSED_BY, gpu);
    return first ? first : second;
}

static void *allocate(ssize_t asked, int device, enum pattern pattern)
{
    struct segment segment = {0, (uint64_t)asked, device, REFUSED};
    struct contexts contexts = {0};
    size_t free_bytes = 0, total = 0;
    int code, advice = 0;
    if (asked <= 0 || device < 0 || device >= MAX_DEVICES || !enter(&states[device], device, &contexts))
        return NULL;
    struct state *state = &states[device];
    code = cuda.info(&free_bytes, &total);
    pthread_mutex_lock(&mutex);
    segment.kind = code ? failed(state, "cuMemGetInfo", code, &state->said.refused_driver)
                        : book(state, segment.bytes, free_bytes, total);
    pthread_mutex_unlock(&mutex);
    if (segment.kind == DEVICE && (code = cuda.allocate(&segment.address, segment.bytes))) {
        pthread_mutex_lock(&mutex);
        segment.kind = book_instead(state, segment.bytes, code);
        pthread_mutex_unlock(&mutex);
    }
    if (segment.kind == MANAGED && !(code = cuda.allocate_managed(&segment.address, segment.bytes, ATTACH_GLOBAL)))
        advice = advise_as(segment, pattern);
    pthread_mutex_lock(&mutex);
    if (advice)
        failed(state, "cuMemAdvise", advice, &state->said.advice_failures);
    if (segment.kind != REFUSED && !code) {
        put(segment);
        state->said.segments[segment.kind]++;
        state->said.allocations[segment.kind]++;
    } else if (segment.kind != REFUSED) {
        failed(state, "cuMemAllocManaged", code, &state->said.refused_driver);
        account(state, MANAGED, segment.bytes, -1);
        unbook_slot();
        segment.address = 0;
    }
    pthread_mutex_unlock(&mutex);
    leave(contexts);
    return (void *)segment.address;
}

/* ---- what torch calls: one entry for each access pattern, so that pools of different patterns share one account ---- */

#define ALLOC(name, pattern) \
    EXPORT void *name(ssize_t bytes, int device, void *stream) { (void)stream; return allocate(bytes, device, pattern); }
ALLOC(supertuner_alloc_gpu_first, GPU_FIRST)
ALLOC(supertuner_alloc_balanced, BALANCED)
ALLOC(supertuner_alloc_cpu_first, CPU_FIRST)

EXPORT void supertuner_free(void *address, size_t asked, int device, void *stream)
{
    (void)asked, (void)stream; /* the size that was noted here is surer */
    struct segment segment = {0};
    struct contexts contexts = {0};
    if (!address || device < 0 || device >= MAX_DEVICES)
        return;
    struct state *state = &states[device];
    if (!enter(state, device, &contexts))
        return;
    pthread_mutex_lock(&mutex);
    struct segment *found = look_up((uint64_t)address);
    int spilling = state->said.stage == 2;
    if (found)
        segment = take(found);
    else
        state->said.foreign_frees++;
    pthread_mutex_unlock(&mutex);
    size_t free_bytes = 0, total = 0;
    int code = found ? cuda.release(segment.address) : 0, unknown = spilling ? cuda.info(&free_bytes, &total) : -1;
    pthread_mutex_lock(&mutex);
    if (found && code) { /* the driver still has it, so it stays in the account */
        failed(state, "cuMemFree", code, &state->said.free_failures);
    } else if (found) {
        account(&states[segment.device], segment.kind, segment.bytes, -1);
        states[segment.device].said.segments[segment.kind]--;
        state->said.frees++;
    }
    if (!unknown && state->said.stage == 2)
        restage(&state->said, (int64_t)(state->said.free_bytes = free_bytes));
    pthread_mutex_unlock(&mutex);
    leave(contexts);
}

/* ---- what Python calls ---- */

/* reserve: bytes of the GPU to keep free, UINT64_MAX for as much as the margin. 0, or -1 for what makes no sense. */
EXPORT int supertuner_overflow_configure(int device, double ratio, uint64_t reserve)
{
    if (device < 0 || device >= MAX_DEVICES || !(ratio >= 1))
        return -1;
    pthread_mutex_lock(&mutex);
    states[device].ratio = ratio;
    states[device].reserve = reserve + 1;
    pthread_mutex_unlock(&mutex);
    return 0;
}

/* The host's side, for all devices: what to leave free, what may be handed out between two looks, what a container could
 * hold of managed memory (UINT64_MAX: no container), and the file to look at. */
EXPORT void supertuner_overflow_host(uint64_t floor, uint64_t reserve, uint64_t cap, const char *meminfo)
{
    pthread_mutex_lock(&mutex);
    host.floor = floor, host.reserve = reserve, host.cap = cap, host.due = 1;
    strncpy(host.meminfo, meminfo, sizeof host.meminfo - 1);
    pthread_mutex_unlock(&mutex);
}

EXPORT void supertuner_overflow_reclaimed(int device, uint64_t light, uint64_t hard)
{
    pthread_mutex_lock(&mutex);
    states[device].said.light_reclamations += light;
    states[device].said.hard_reclamations += hard;
    pthread_mutex_unlock(&mutex);
}

EXPORT int supertuner_overflow_kind(const void *address) /* of a live segment: 0 device, 1 managed; -1: not ours */
{
    pthread_mutex_lock(&mutex);
    struct segment *found = look_up((uint64_t)address);
    int kind = found ? found->kind : REFUSED;
    pthread_mutex_unlock(&mutex);
    return kind;
}

EXPORT int supertuner_overflow_statistics(int device, struct statistics *out, size_t size)
{
    if (device < 0 || device >= MAX_DEVICES || size != sizeof *out)
        return -1;
    pthread_mutex_lock(&mutex);
    *out = states[device].said;
    out->version = STATISTICS_VERSION, out->size = sizeof *out;
    out->host_floor_bytes = host.floor, out->host_room_bytes = host.room, out->host_looks = host.looks;
    pthread_mutex_unlock(&mutex);
    return 0;
}
