/* Times the overflow allocator and the driver itself in one process; used by bench_allocator.py.
 *
 * usage: bench_allocator LIVE ROUNDS PAIRS MANAGED      with a fake libcuda.so.1 in LD_LIBRARY_PATH
 * With LIVE segments alive, each round times PAIRS of allocation and free: by the driver, then by the plugin on top of the
 * same driver. It prints one line per round: nanoseconds of a pair by the driver, and by the plugin. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "../supertuner/memory/overflow_allocator/_overflow.c"

enum { BYTES = 2 << 20 };

static double now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

static void by_driver(long pairs, int managed)
{
    for (long i = 0; i < pairs; i++) {
        uint64_t address = 0;
        struct location gpu = {AT_DEVICE, 0};
        int code = managed ? cuda.allocate_managed(&address, BYTES, ATTACH_GLOBAL) : cuda.allocate(&address, BYTES);
        if (managed && !code)
            code = cuda.advise(address, BYTES, PREFERRED_LOCATION, gpu);
        if (code || cuda.release(address))
            exit(2);
    }
}

static void by_plugin(long pairs)
{
    for (long i = 0; i < pairs; i++) {
        void *address = supertuner_alloc_gpu_first(BYTES, 0, NULL);
        if (!address)
            exit(3);
        supertuner_free(address, BYTES, 0, NULL);
    }
}

int main(int count, char **arguments)
{
    if (count != 5)
        return 1;
    long live_segments = atol(arguments[1]), rounds = atol(arguments[2]), pairs = atol(arguments[3]);
    int managed = atoi(arguments[4]);
    supertuner_overflow_configure(0, 100.0, managed ? (uint64_t)1 << 50 : 0); /* a reserve larger than the GPU: stage 2 */
    supertuner_overflow_host(0, (uint64_t)1 << 30, UINT64_MAX, "/proc/meminfo");
    for (long i = 0; i < live_segments; i++)
        if (!supertuner_alloc_gpu_first(4096, 0, NULL))
            return 3;
    struct contexts contexts = {0};
    if (enter_context_counting(0, &contexts, &states[0].stats.refused_driver)) /* the context stays current, as in torch */
        return 4;
    for (long round = -1; round < rounds; round++) { /* the first round warms up */
        double begin = now_ns();
        by_driver(pairs, managed);
        double middle = now_ns();
        by_plugin(pairs);
        double end = now_ns();
        if (round >= 0)
            printf("%.1f %.1f\n", (middle - begin) / (double)pairs, (end - middle) / (double)pairs);
    }
    return states[0].stats.segments[managed ? MANAGED : DEVICE] == (uint64_t)live_segments ? 0 : 5;
}
