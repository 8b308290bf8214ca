/* Preloaded into a test process: writes and syncs of files whose path contains FAIL_PATH fail with FAIL_ERRNO after
 * FAIL_AFTER successful ones. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static long calls;

static int fails(int fd) {
    const char *path = getenv("FAIL_PATH"), *after = getenv("FAIL_AFTER"), *error = getenv("FAIL_ERRNO");
    char link[64], target[4096];
    if (!path || !after || !error) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, target, sizeof target - 1);
    if (length < 0) return 0;
    target[length] = 0;
    if (!strstr(target, path) || calls++ < atol(after)) return 0;
    errno = atoi(error);
    return 1;
}

ssize_t pwrite64(int fd, const void *content, size_t nbytes, off64_t offset) {
    if (fails(fd)) return -1;
    ssize_t (*real)(int, const void *, size_t, off64_t) = dlsym(RTLD_NEXT, "pwrite64");
    return real(fd, content, nbytes, offset);
}

ssize_t pwrite(int fd, const void *content, size_t nbytes, off_t offset) { return pwrite64(fd, content, nbytes, offset); }

int fsync(int fd) {
    if (fails(fd)) return -1;
    int (*real)(int) = dlsym(RTLD_NEXT, "fsync");
    return real(fd);
}
