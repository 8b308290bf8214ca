/* The floor of host memory that spilling keeps free: how much managed memory the host could hold, read rarely.
 *
 * Reading /proc/meminfo takes about ten microseconds, so it is read only when `reserve` bytes were allocated since
 * the last reading, or when that is too old. The caller holds the mutex. Part of _overflow.c. */
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MAX_READING_AGE_NS 100000000

static struct {
    char meminfo[256];
    uint64_t floor, reserve, cap; /* cap: managed memory that this process's container could hold */
    uint64_t managed;             /* live managed bytes of all devices */
    uint64_t room, since;         /* capacity of the host for them; bytes allocated since the last reading */
    uint64_t base, readings;      /* base: the capacity as read with the least managed memory allocated */
    int64_t read_ns;
    int stale;
} host = {.meminfo = "/proc/meminfo", .reserve = (uint64_t)1 << 30, .cap = UINT64_MAX, .stale = 1};

static void add_managed_bytes(uint64_t bytes) /* a wrapped negative number for freed bytes */
{
    host.managed += bytes;
    host.since += (int64_t)bytes > 0 ? bytes : 0;
}

/* The room is the managed memory that the host could hold if all of it were moved to the host. It has two upper
 * bounds. Available plus allocated memory, which accounts for what other processes take. And the memory that was
 * available before anything was allocated, which accounts for memory that is allocated but not touched yet. */
static void read_available(int64_t now_ns)
{
    char text[256];
    int file = open(host.meminfo, O_RDONLY | O_CLOEXEC);
    ssize_t got = file < 0 ? 0 : read(file, text, sizeof text - 1);
    if (file >= 0)
        close(file);
    text[got > 0 ? got : 0] = 0;
    const char *line = strstr(text, "MemAvailable:");
    uint64_t available = line ? strtoull(line + strlen("MemAvailable:"), NULL, 10) * 1024 : 0;
    uint64_t most = line ? available + host.managed : 0; /* a floor that cannot be read cannot be kept: refuse */
    if (!host.readings || !host.managed)
        host.base = most;
    else if (host.base < available)
        host.base = available;
    host.room = host.base < most ? host.base : most;
    host.readings++;
    host.read_ns = now_ns;
    host.since = 0;
    host.stale = 0;
}

static int host_allows(uint64_t bytes)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    int64_t now_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    if (host.stale || host.since + bytes > host.reserve || now_ns - host.read_ns > MAX_READING_AGE_NS)
        read_available(now_ns);
    uint64_t room = host.room < host.cap ? host.room : host.cap;
    return host.floor <= room && host.managed + bytes <= room - host.floor;
}
