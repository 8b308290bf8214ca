/* Driver calls that fill and copy: bytes are really written, and the GPU touches both ends.
 *
 * Memory that the GPU cannot access (system memory without pageable access) may still be one end of a copy, because
 * the real driver stages it through pinned memory. It cannot be filled. */
#include "fake.h"

#include <string.h>

static bool reachable(uintptr_t address) {
    struct found found;
    return range_at(address, &found) || pageable();
}

static CUresult inside(uintptr_t address, size_t nbytes) { /* OK unless it extends beyond the end of a range */
    struct found found;
    return range_at(address, &found) && address + nbytes > found.base + found.nbytes ? INVALID_VALUE : OK;
}

static CUresult fill(uintptr_t address, const void *pattern, size_t width, size_t count, CUstream stream) {
    int device;
    CUresult result = stream_device(stream, &device);
    if (result != OK || !count) return result;
    if (!reachable(address) || inside(address, width * count) != OK) return INVALID_VALUE;
    pages_touch(address, width * count, device);
    if (width == 1) memset((void *)address, *(const unsigned char *)pattern, count);
    for (size_t i = 0; width > 1 && i < count; i++) memcpy((char *)address + i * width, pattern, width);
    return OK;
}

static CUresult copy(uintptr_t target, uintptr_t source, size_t nbytes, CUstream stream) {
    int device;
    CUresult result = stream_device(stream, &device);
    if (result != OK || !nbytes) return result;
    if (!target || !source || inside(target, nbytes) != OK || inside(source, nbytes) != OK) return INVALID_VALUE;
    pages_touch(source, nbytes, device);
    pages_touch(target, nbytes, device);
    memmove((void *)target, (const void *)source, nbytes);
    return OK;
}

/* Fills of one, two and four bytes, synchronous and asynchronous. */
#define FILLS(name, type)                                                                     \
    API CUresult name##_v2(CUdeviceptr address, type value, size_t count) {                   \
        CALL(#name, fill(address, &value, sizeof value, count, NULL), "%#llx %zu", address, count); \
    }                                                                                         \
    API CUresult name##Async(CUdeviceptr address, type value, size_t count, CUstream stream) { \
        CALL(#name "Async", fill(address, &value, sizeof value, count, stream), "%#llx %zu", address, count); \
    }
FILLS(cuMemsetD8, unsigned char)
FILLS(cuMemsetD16, unsigned short)
FILLS(cuMemsetD32, unsigned int)

/* Copies: the real driver distinguishes them by pointer type; here all are the same. */
#define COPIES(name, suffix, to, from)                                                                            \
    API CUresult name##suffix(to target, from source, size_t nbytes) {                                            \
        CALL(#name, copy((uintptr_t)target, (uintptr_t)source, nbytes, NULL), "%zu", nbytes);                     \
    }                                                                                                             \
    API CUresult name##Async##suffix(to target, from source, size_t nbytes, CUstream stream) {                    \
        CALL(#name "Async", copy((uintptr_t)target, (uintptr_t)source, nbytes, stream), "%zu", nbytes);           \
    }
COPIES(cuMemcpy, , CUdeviceptr, CUdeviceptr)
COPIES(cuMemcpyHtoD, _v2, CUdeviceptr, const void *)
COPIES(cuMemcpyDtoH, _v2, void *, CUdeviceptr)
COPIES(cuMemcpyDtoD, _v2, CUdeviceptr, CUdeviceptr)
