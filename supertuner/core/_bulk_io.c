/* Many small files read, or many records written, in one call: no lock of the interpreter is taken or given in between.
   Loaded with ctypes, which releases that lock for the call; core/many.py says what the arguments mean. */
#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <sys/stat.h>
#include <unistd.h>

static int read_one(const char *path, int64_t offset, int64_t nbytes, char *to, int64_t *facts) {
    int error = 0, fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    struct stat status;
    if (fd < 0) return errno;
    for (int64_t done = 0; done < nbytes && !error;) {
        ssize_t got = pread(fd, to + done, (size_t)(nbytes - done), offset + done);
        if (got < 0 && errno != EINTR) error = errno;
        if (got == 0) break; /* shorter than it was: its size tells */
        if (got > 0) done += got;
    }
    if (!error && fstat(fd, &status) < 0) error = errno;
    if (!error) {
        facts[0] = status.st_size;
        facts[1] = (int64_t)status.st_mtim.tv_sec * 1000000000 + status.st_mtim.tv_nsec;
        facts[2] = S_ISREG(status.st_mode);
    }
    close(fd);
    return error;
}

void supertuner_read_files(int64_t count, const char *const *paths, const int64_t *offsets, const int64_t *nbytes,
                           char *buffer, const int64_t *places, int64_t *facts, int64_t *errors) {
    for (int64_t i = 0; i < count; i++)
        errors[i] = read_one(paths[i], offsets[i], nbytes[i], buffer + places[i], facts + 3 * i);
}

int supertuner_write_pieces(int fd, int64_t count, const char *buffer, const int64_t *places, const int64_t *nbytes,
                            const int64_t *offsets) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t done = 0; done < nbytes[i];) {
            ssize_t put = pwrite(fd, buffer + places[i] + done, (size_t)(nbytes[i] - done), offsets[i] + done);
            if (put < 0 && errno != EINTR) return errno;
            if (put == 0) return EIO;
            if (put > 0) done += put;
        }
    return 0;
}
