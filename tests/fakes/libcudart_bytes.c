/* Copying and filling bytes in the fake CUDA runtime: real, in order, and complete when the call returns.
 *
 * The phantom pretends to have far more memory than the machine, which works because pages that were never written
 * do not exist. So zeros are not written: where a whole page of the target would become zeros, the page is returned
 * to the kernel, which shows the same zeros. A reader always sees correct bytes. This applies to memory of the fake
 * driver; other memory of the process may be a shared mapping, and is written as usual.
 *
 * A copy touches managed pages as the GPU would, and the fake driver moves them by its rules. Ordinary host memory
 * is read in place: copy engines do not cause migrations. Kernels do nothing and touch nothing. */
#define _GNU_SOURCE
#include "libcudart.h"

#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SMALL = 1 << 20 }; /* below this size a plain copy is cheaper than querying the kernel about pages */

static size_t page_bytes(void) { return (size_t)sysconf(_SC_PAGESIZE); }

/* Function of the fake driver for tests: pages move as if a GPU had used them. */
void fakecuda_gpu_touch(uintptr_t address, size_t count, int device);

static int is_ours(const void *pointer) {
    unsigned type;
    return cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)pointer) == CUDA_SUCCESS;
}

static void touch_managed(const void *pointer, size_t count) {
    unsigned managed = 0;
    int device;
    if (cuPointerGetAttribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, (CUdeviceptr)pointer) != CUDA_SUCCESS || !managed) return;
    if (cudaGetDevice(&device) == cudaSuccess) fakecuda_gpu_touch((uintptr_t)pointer, count, device);
}

static int all_zero(const char *bytes, size_t count) { return bytes[0] == 0 && memcmp(bytes, bytes + 1, count - 1) == 0; }

/* Whether any page of the range was ever touched; queried from the kernel, so that the check does not touch it. */
static int populated(const char *from, size_t count) {
    size_t page = page_bytes();
    unsigned char there[512];
    for (size_t done = 0; done < count; done += sizeof there * page) {
        size_t length = count - done < sizeof there * page ? count - done : sizeof there * page;
        if (mincore((void *)(from + done), length, there) != 0) return 1;
        for (size_t i = 0; i < (length + page - 1) / page; i++)
            if (there[i] & 1) return 1;
    }
    return 0;
}

static void zero_ours(char *target, size_t count) {
    size_t page = page_bytes();
    char *first = (char *)(((uintptr_t)target + page - 1) / page * page);
    char *end = (char *)(((uintptr_t)target + count) / page * page);
    if (end <= first) {
        memset(target, 0, count);
        return;
    }
    memset(target, 0, (size_t)(first - target));
    memset(end, 0, (size_t)(target + count - end));
    if (madvise(first, (size_t)(end - first), MADV_DONTNEED) != 0) memset(first, 0, (size_t)(end - first));
}

static cudaError_t fill_bytes(void *target, int value, size_t count) {
    cudaError_t error = use_device();
    if (error != cudaSuccess) return error;
    touch_managed(target, count);
    if (value == 0 && count > SMALL && is_ours(target))
        zero_ours(target, count);
    else
        memset(target, value, count);
    return cudaSuccess;
}

static cudaError_t copy_bytes(void *target, const void *source, size_t count) {
    cudaError_t error = use_device();
    if (error != cudaSuccess || count == 0) return error;
    touch_managed(source, count);
    touch_managed(target, count);
    if (count <= SMALL || !is_ours(target)) {
        memmove(target, source, count);
        return cudaSuccess;
    }
    size_t page = page_bytes(), block = SMALL;
    for (size_t done = 0; done < count; done += block) {
        const char *from = (const char *)source + done;
        size_t length = count - done < block ? count - done : block;
        uintptr_t page_start = (uintptr_t)from / page * page;
        if (!populated((const char *)page_start, (uintptr_t)from + length - page_start) || all_zero(from, length))
            zero_ours((char *)target + done, length);
        else
            memcpy((char *)target + done, from, length);
    }
    return cudaSuccess;
}

/* For torch_zeros.cpp. Reading first commits nothing: pages that were never written are read as the kernel's zero
 * page. */
void phantom_clear(void *from, size_t count) {
    if (count > SMALL)
        zero_ours(from, count);
    else if (count > 0 && !all_zero(from, count))
        memset(from, 0, count);
}

cudaError_t cudaMemcpy(void *target, const void *source, size_t count, enum cudaMemcpyKind kind) {
    return copy_bytes(target, source, count);
}

cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t count, enum cudaMemcpyKind kind, cudaStream_t stream) {
    fakecuda_said("cudaMemcpyAsync %p %p %zu %p", target, source, count, (void *)stream);
    return copy_bytes(target, source, count);
}

cudaError_t cudaMemcpyPeerAsync(void *target, int to, const void *source, int from, size_t count, cudaStream_t stream) {
    return copy_bytes(target, source, count);
}

cudaError_t cudaMemcpy2DAsync(void *target, size_t target_pitch, const void *source, size_t source_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    for (size_t row = 0; row < height; row++)
        copy_bytes((char *)target + row * target_pitch, (const char *)source + row * source_pitch, width);
    return cudaSuccess;
}

cudaError_t cudaMemset(void *target, int value, size_t count) { return fill_bytes(target, value, count); }

cudaError_t cudaMemsetAsync(void *target, int value, size_t count, cudaStream_t stream) {
    return fill_bytes(target, value, count);
}
