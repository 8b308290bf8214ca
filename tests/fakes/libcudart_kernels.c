/* Kernels in the fake CUDA runtime: they register, have the attributes of compiled sm_90 code, and do nothing.
 *
 * No attribute is zero: torch and the libraries compiled into it divide by some of them and compare the architecture
 * of their binary with others. */
#define _GNU_SOURCE
#include "libcudart.h"

#include <string.h>

enum { REGISTERS_PER_THREAD = 64, SHARED_PER_SM = 233472, THREADS_PER_SM = 2048, BLOCKS_PER_SM = 32 };

/* ---- called by the compiler's start-up code for each embedded binary ---- */

void **__cudaRegisterFatBinary(void *binary) {
    static void *handle;
    return &handle;
}

void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterFunction(void) {}
void __cudaRegisterVar(void) {}
char __cudaInitModule(void **handle) { return 1; }

/* ---- kernel<<<…>>>: the configuration is stored by push and returned by pop, as the compiler's stub expects ---- */

static __thread struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} pending;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    pending.grid = grid;
    pending.block = block;
    pending.shared = shared;
    pending.stream = stream;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = pending.grid;
    *block = pending.block;
    *shared = pending.shared;
    *(void **)stream = pending.stream;
    return cudaSuccess;
}

/* The handle of a kernel is its host function. */
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

/* A launch that a GPU would reject is rejected: an empty or oversized grid or block is a bug of the caller. */
static cudaError_t launch(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
    cudaError_t error = use_device(); /* a launch creates the thread's context, which cuBLAS then expects */
    if (error != cudaSuccess) return error;
    unsigned long long threads = (unsigned long long)block.x * block.y * block.z;
    if (threads == 0 || threads > 1024 || block.z > 64) return note(cudaErrorInvalidConfiguration);
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return note(cudaErrorInvalidConfiguration);
    if (grid.x > 2147483647u || grid.y > 65535 || grid.z > 65535) return note(cudaErrorInvalidConfiguration);
    if (shared > 232448) return note(cudaErrorInvalidValue);
    fakecuda_said("cudaLaunchKernel %p", (void *)stream);
    return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
    return launch(grid, block, shared, stream);
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
    return launch(grid, block, shared, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) {
    return launch(config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream);
}

/* ---- attributes ---- */

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = REGISTERS_PER_THREAD;
    attributes->binaryVersion = attributes->ptxVersion = 90;
    attributes->constSizeBytes = 1024;
    attributes->maxDynamicSharedSizeBytes = 232448;
    attributes->preferredShmemCarveout = -1;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value) { return cudaSuccess; }

cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t kernel, enum cudaFuncAttribute attribute, int value, int device) {
    return cudaSuccess;
}

static int smaller(int a, int b) { return a < b ? a : b; }

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int block_threads,
                                                                   size_t shared, unsigned flags) {
    if (block_threads <= 0) return note(cudaErrorInvalidValue);
    int by_threads = smaller(BLOCKS_PER_SM, THREADS_PER_SM / block_threads);
    int by_registers = 65536 / (REGISTERS_PER_THREAD * block_threads);
    int by_shared = (int)(SHARED_PER_SM / (shared + 1024));
    *blocks = smaller(by_threads, smaller(by_registers, by_shared));
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int block_threads, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, block_threads, shared, 0);
}

/* Constants for kernels; no kernel reads them. */
cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *source, size_t count, size_t offset, enum cudaMemcpyKind kind) {
    return cudaSuccess;
}

cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
cudaError_t cudaProfilerStop(void) { return cudaSuccess; }
