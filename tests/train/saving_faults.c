/* Preloaded into a test's process: counts the calls that change files, and at the nth kills the process, or fails.
   Nothing happens until faults_arm() is called. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

enum { OFF, COUNT, KILL_BEFORE, KILL_AFTER, KILL_INSIDE, FAIL_ONCE, FAIL_ON, SHORT };

static int mode, error_number, log_fd = -1;
static long at, calls;

void faults_arm(int how, long nth, int error, int log) {
    mode = how, at = nth, error_number = error, log_fd = log, calls = 0;
}

long faults_calls(void) { return calls; }

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

static void told(const char *what, const char *one, const char *two) {
    if (log_fd >= 0) dprintf(log_fd, "%s\t%s\t%s\n", what, one, two);
}

static const char *name_of(int fd, char *target, size_t room) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, target, room - 1);
    target[length < 0 ? 0 : length] = 0;
    return target;
}

/* Before a call: 1 if it is to fail. Only what can meet a full disk goes on failing; the rest may still clean up. */
static int before(int needs_room) {
    if (mode == OFF) return 0;
    long number = calls++;
    if (mode == KILL_BEFORE && number == at) die();
    int fails = (mode == FAIL_ONCE && number == at) || (mode == FAIL_ON && needs_room && number >= at);
    if (fails) errno = error_number;
    return fails;
}

static void after(void) {
    if (mode == KILL_AFTER && calls - 1 == at) die();
}

#define CALL(type, failed, needs_room, what, one, two, real)  \
    if (before(needs_room)) return failed;                    \
    if (mode != OFF) told(what, one, two);                    \
    type result = real;                                       \
    after();                                                  \
    return result

int open64(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t bits = (flags & O_CREAT) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    CALL(int, -1, (flags & O_CREAT) != 0, flags & O_CREAT ? "create" : "open", path, "", REAL(open64)(path, flags, bits));
}

int openat64(int folder, const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t bits = (flags & O_CREAT) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    CALL(int, -1, (flags & O_CREAT) != 0, "openat", path, "", REAL(openat64)(folder, path, flags, bits));
}

DIR *opendir(const char *path) { CALL(DIR *, NULL, 0, "opendir", path, "", REAL(opendir)(path)); }

int close(int fd) {
    char path[4096];
    /* A close that fails has closed all the same. */
    if (before(0)) return REAL(close)(fd), errno = error_number, -1;
    if (mode != OFF) told("close", name_of(fd, path, sizeof path), "");
    int result = REAL(close)(fd);
    after();
    return result;
}

ssize_t pwrite64(int fd, const void *content, size_t nbytes, off64_t offset) {
    char path[4096];
    int here = mode != OFF && calls == at && nbytes > 1;
    if (before(1)) return -1;
    if (mode != OFF) told("write", name_of(fd, path, sizeof path), "");
    if (here && mode == KILL_INSIDE) REAL(pwrite64)(fd, content, nbytes / 2, offset), die();
    ssize_t result = REAL(pwrite64)(fd, content, here && mode == SHORT ? nbytes / 2 : nbytes, offset);
    after();
    return result;
}

int fsync(int fd) {
    char path[4096];
    CALL(int, -1, 1, "fsync", name_of(fd, path, sizeof path), "", REAL(fsync)(fd));
}

int mkdir(const char *path, mode_t bits) { CALL(int, -1, 1, "mkdir", path, "", REAL(mkdir)(path, bits)); }

int rename(const char *old, const char *new) { CALL(int, -1, 1, "rename", old, new, REAL(rename)(old, new)); }

int unlink(const char *path) { CALL(int, -1, 0, "unlink", path, "", REAL(unlink)(path)); }

int unlinkat(int folder, const char *path, int flags) {
    char place[4096];
    CALL(int, -1, 0, "unlinkat", name_of(folder, place, sizeof place), path, REAL(unlinkat)(folder, path, flags));
}

int rmdir(const char *path) { CALL(int, -1, 0, "rmdir", path, "", REAL(rmdir)(path)); }

int statvfs64(const char *path, struct statvfs64 *found) {
    CALL(int, -1, 0, "statvfs", path, "", REAL(statvfs64)(path, found));
}
