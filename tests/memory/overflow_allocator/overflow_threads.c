/* Eight threads use the overflow allocator concurrently: a program for a sanitizer, compiled together with the
 * allocator.
 *
 * usage: overflow_threads OPERATIONS, with a fake libcuda.so.1 in LD_LIBRARY_PATH
 *
 * Each thread allocates and frees segments of all patterns, marks its memory, and passes some segments to its
 * neighbour, which frees them, as torch's threads do; another thread reads statistics meanwhile. At the end nothing
 * may be left and all counts must agree. Exit code 0, or 1 with a message. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/types.h>

#include "../../../supertuner/memory/overflow_allocator/_overflow.c"

enum { THREADS = 8, HELD = 24, MOST_PAGES = 48 };

typedef void *(*allocation)(ssize_t, int, void *);
static const allocation allocations[] = {supertuner_alloc_gpu_first, supertuner_alloc_balanced, supertuner_alloc_cpu_first};
static long operations;
static atomic_long allocated, refused, freed, wrong;
static atomic_int running = THREADS;
static void *_Atomic passed_on[THREADS]; /* segments that another thread will free */

static uint32_t next(uint32_t *seed)
{
    *seed ^= *seed << 13;
    *seed ^= *seed >> 17;
    return *seed ^= *seed << 5;
}

static void release_segment(void *address)
{
    if (!address)
        return;
    if (*(uint64_t *)address != (uint64_t)address)
        wrong++; /* two threads received the same memory */
    *(uint64_t *)address = 0;
    supertuner_free(address, 0, 0, NULL);
    freed++;
}

static void *work(void *number)
{
    long self = (long)number;
    uint32_t seed = 88172645u + (uint32_t)self * 7919u;
    void *held[HELD] = {0};
    for (long done = 0; done < operations; done++) {
        int at = (int)(next(&seed) % HELD);
        if (held[at] && next(&seed) % 4 == 0) {
            release_segment(atomic_exchange(&passed_on[(self + 1) % THREADS], held[at]));
            held[at] = NULL;
        } else if (held[at]) {
            release_segment(held[at]);
            held[at] = NULL;
        } else {
            held[at] = allocations[next(&seed) % 3]((ssize_t)(1 + next(&seed) % MOST_PAGES) * 65536, 0, NULL);
            if (held[at]) {
                *(uint64_t *)held[at] = (uint64_t)held[at];
                allocated++;
            } else {
                refused++;
            }
        }
        release_segment(atomic_exchange(&passed_on[self], NULL));
    }
    for (int i = 0; i < HELD; i++)
        release_segment(held[i]);
    running--;
    return NULL;
}

static void *watch(void *unused)
{
    struct statistics now;
    while (running) {
        supertuner_overflow_statistics(0, &now, sizeof now);
        if (now.bytes[DEVICE] + now.bytes[MANAGED] > now.limit_bytes)
            wrong++; /* the limit must hold at every moment */
        supertuner_overflow_kind(&now);
        supertuner_overflow_host(0, 1 << 20, UINT64_MAX, "/proc/meminfo");
    }
    return unused;
}

int main(int count, char **arguments)
{
    operations = (count > 1 ? atol(arguments[1]) : 10000) / THREADS;
    supertuner_overflow_configure(0, 1.5, UINT64_MAX);
    pthread_t threads[THREADS + 1];
    pthread_create(&threads[THREADS], NULL, watch, NULL);
    for (long i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, work, (void *)i);
    for (int i = 0; i <= THREADS; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < THREADS; i++)
        release_segment(passed_on[i]);
    struct statistics end;
    supertuner_overflow_statistics(0, &end, sizeof end);
    long live = 0;
    for (int i = 0; i < 1 << BUCKET_BITS; i++)
        live += buckets[i] != NULL;
    long counted_allocations = (long)(end.allocations[DEVICE] + end.allocations[MANAGED]);
    int good = !wrong && !end.bytes[DEVICE] && !end.bytes[MANAGED] && !end.segments[DEVICE] && !end.segments[MANAGED] &&
               !live && !host.managed && counted_allocations == allocated && (long)end.frees == freed && allocated == freed &&
               !end.foreign_frees && !end.refused_driver && (long)end.refused_ratio == refused;
    printf("allocated %ld (%lu managed), refused %ld, in and out of stage 2: %lu and %lu, wrong %ld: %s\n", (long)allocated,
           (unsigned long)end.allocations[MANAGED], (long)refused, (unsigned long)end.entered, (unsigned long)end.left,
           (long)wrong, good ? "good" : "BAD");
    return !good;
}
