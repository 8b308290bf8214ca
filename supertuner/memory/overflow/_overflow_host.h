/* The floor of host memory that spilling keeps: how much managed memory the host could hold, looked up seldom.
 *
 * /proc/meminfo costs some ten microseconds, so it is read only when `reserve` bytes were handed out since the last look,
 * or when that is long ago. The caller holds the mutex. Part of _overflow.c. */
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define LOOK_AGE_NS 100000000

static struct {
    char meminfo[256];
    uint64_t floor, reserve, cap; /* cap: what this process's container could hold of managed memory */
    uint64_t managed;             /* live managed bytes of all devices */
    uint64_t room, since;         /* what the host could hold of them; handed out since that was looked at */
    uint64_t base, looks;         /* base: the room as it was with the least of our memory in it */
    int64_t looked_ns;
    int due;
} host = {.meminfo = "/proc/meminfo", .reserve = (uint64_t)1 << 30, .cap = UINT64_MAX, .due = 1};

static void hand_out(uint64_t bytes) /* a negative number, wrapped, for what comes back */
{
    host.managed += bytes;
    host.since += (int64_t)bytes > 0 ? bytes : 0;
}

/* The room is what the host could hold of managed memory if all of it were sent home. It is no more than what is
 * available and what we handed out, together: that sees what others take. And it is no more than what was available
 * before we handed out anything: that sees what we handed out and nobody has touched yet. */
static void look(int64_t now_ns)
{
    char text[256];
    int file = open(host.meminfo, O_RDONLY | O_CLOEXEC);
    ssize_t got = file < 0 ? 0 : read(file, text, sizeof text - 1);
    if (file >= 0)
        close(file);
    text[got > 0 ? got : 0] = 0;
    const char *line = strstr(text, "MemAvailable:");
    uint64_t available = line ? strtoull(line + strlen("MemAvailable:"), NULL, 10) * 1024 : 0;
    uint64_t most = line ? available + host.managed : 0; /* a floor that cannot be seen cannot be kept */
    if (!host.looks || !host.managed)
        host.base = most;
    else if (host.base < available)
        host.base = available;
    host.room = host.base < most ? host.base : most;
    host.looks++;
    host.looked_ns = now_ns;
    host.since = 0;
    host.due = 0;
}

static int host_allows(uint64_t bytes)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    int64_t now_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    if (host.due || host.since + bytes > host.reserve || now_ns - host.looked_ns > LOOK_AGE_NS)
        look(now_ns);
    uint64_t room = host.room < host.cap ? host.room : host.cap;
    return host.floor <= room && host.managed + bytes <= room - host.floor;
}
