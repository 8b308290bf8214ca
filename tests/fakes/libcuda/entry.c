/* cuGetProcAddress: the function for a name, for a program of a given CUDA version on this driver.
 *
 * The number is the CUDA version in which the function received this signature. One name may have several; the
 * result is the newest that both program and driver support. */
#include "fake.h"

#include <string.h>

/* A table of addresses needs no signatures. */
#define DECLARE(version, name, function) extern char function[];
#define ENTRY(version, name, function) {name, version, function},
#define ENTRIES(X)                                                                     \
    X(2000, "cuInit", cuInit)                                                          \
    X(2020, "cuDriverGetVersion", cuDriverGetVersion)                                  \
    X(2000, "cuDeviceGet", cuDeviceGet)                                                \
    X(2000, "cuDeviceGetCount", cuDeviceGetCount)                                      \
    X(2000, "cuDeviceGetName", cuDeviceGetName)                                        \
    X(2000, "cuDeviceGetAttribute", cuDeviceGetAttribute)                              \
    X(3020, "cuDeviceTotalMem", cuDeviceTotalMem_v2)                                   \
    X(9020, "cuDeviceGetUuid", cuDeviceGetUuid)                                        \
    X(11040, "cuDeviceGetUuid", cuDeviceGetUuid_v2)                                    \
    X(4010, "cuDeviceGetPCIBusId", cuDeviceGetPCIBusId)                                \
    X(4000, "cuDeviceCanAccessPeer", cuDeviceCanAccessPeer)                            \
    X(7000, "cuDevicePrimaryCtxRetain", cuDevicePrimaryCtxRetain)                      \
    X(11000, "cuDevicePrimaryCtxRelease", cuDevicePrimaryCtxRelease_v2)                \
    X(7000, "cuDevicePrimaryCtxGetState", cuDevicePrimaryCtxGetState)                  \
    X(11000, "cuDevicePrimaryCtxSetFlags", cuDevicePrimaryCtxSetFlags_v2)              \
    X(4000, "cuCtxPushCurrent", cuCtxPushCurrent_v2)                                   \
    X(4000, "cuCtxPopCurrent", cuCtxPopCurrent_v2)                                     \
    X(4000, "cuCtxSetCurrent", cuCtxSetCurrent)                                        \
    X(4000, "cuCtxGetCurrent", cuCtxGetCurrent)                                        \
    X(2000, "cuCtxGetDevice", cuCtxGetDevice)                                          \
    X(2000, "cuCtxSynchronize", cuCtxSynchronize)                                      \
    X(5050, "cuCtxGetStreamPriorityRange", cuCtxGetStreamPriorityRange)                \
    X(2000, "cuStreamCreate", cuStreamCreate)                                          \
    X(5050, "cuStreamCreateWithPriority", cuStreamCreateWithPriority)                  \
    X(4000, "cuStreamDestroy", cuStreamDestroy_v2)                                     \
    X(2000, "cuStreamSynchronize", cuStreamSynchronize)                                \
    X(2000, "cuStreamQuery", cuStreamQuery)                                            \
    X(3020, "cuStreamWaitEvent", cuStreamWaitEvent)                                    \
    X(5050, "cuStreamGetPriority", cuStreamGetPriority)                                \
    X(2000, "cuEventCreate", cuEventCreate)                                            \
    X(4000, "cuEventDestroy", cuEventDestroy_v2)                                       \
    X(2000, "cuEventRecord", cuEventRecord)                                            \
    X(2000, "cuEventQuery", cuEventQuery)                                              \
    X(2000, "cuEventSynchronize", cuEventSynchronize)                                  \
    X(2000, "cuEventElapsedTime", cuEventElapsedTime)                                  \
    X(12080, "cuEventElapsedTime", cuEventElapsedTime_v2)                              \
    X(6000, "cuGetErrorName", cuGetErrorName)                                          \
    X(6000, "cuGetErrorString", cuGetErrorString)                                      \
    X(3020, "cuMemAlloc", cuMemAlloc_v2)                                               \
    X(6000, "cuMemAllocManaged", cuMemAllocManaged)                                    \
    X(3020, "cuMemFree", cuMemFree_v2)                                                 \
    X(11020, "cuMemAllocAsync", cuMemAllocAsync)                                       \
    X(11020, "cuMemFreeAsync", cuMemFreeAsync)                                         \
    X(2020, "cuMemHostAlloc", cuMemHostAlloc)                                          \
    X(3020, "cuMemAllocHost", cuMemAllocHost_v2)                                       \
    X(2000, "cuMemFreeHost", cuMemFreeHost)                                            \
    X(6050, "cuMemHostRegister", cuMemHostRegister_v2)                                 \
    X(4000, "cuMemHostUnregister", cuMemHostUnregister)                                \
    X(3020, "cuMemHostGetDevicePointer", cuMemHostGetDevicePointer_v2)                 \
    X(3020, "cuMemGetInfo", cuMemGetInfo_v2)                                           \
    X(3020, "cuMemGetAddressRange", cuMemGetAddressRange_v2)                           \
    X(4000, "cuPointerGetAttribute", cuPointerGetAttribute)                            \
    X(7000, "cuPointerGetAttributes", cuPointerGetAttributes)                          \
    X(8000, "cuMemAdvise", cuMemAdvise)                                                \
    X(12020, "cuMemAdvise", cuMemAdvise_v2)                                            \
    X(8000, "cuMemPrefetchAsync", cuMemPrefetchAsync)                                  \
    X(12020, "cuMemPrefetchAsync", cuMemPrefetchAsync_v2)                              \
    X(13000, "cuMemPrefetchBatchAsync", cuMemPrefetchBatchAsync)                       \
    X(13000, "cuMemDiscardBatchAsync", cuMemDiscardBatchAsync)                         \
    X(13000, "cuMemDiscardAndPrefetchBatchAsync", cuMemDiscardAndPrefetchBatchAsync)   \
    X(8000, "cuMemRangeGetAttribute", cuMemRangeGetAttribute)                          \
    X(8000, "cuMemRangeGetAttributes", cuMemRangeGetAttributes)                        \
    X(3020, "cuMemsetD8", cuMemsetD8_v2)                                               \
    X(3020, "cuMemsetD8Async", cuMemsetD8Async)                                        \
    X(3020, "cuMemsetD16", cuMemsetD16_v2)                                             \
    X(3020, "cuMemsetD16Async", cuMemsetD16Async)                                      \
    X(3020, "cuMemsetD32", cuMemsetD32_v2)                                             \
    X(3020, "cuMemsetD32Async", cuMemsetD32Async)                                      \
    X(4000, "cuMemcpy", cuMemcpy)                                                      \
    X(4000, "cuMemcpyAsync", cuMemcpyAsync)                                            \
    X(3020, "cuMemcpyHtoD", cuMemcpyHtoD_v2)                                           \
    X(3020, "cuMemcpyHtoDAsync", cuMemcpyHtoDAsync_v2)                                 \
    X(3020, "cuMemcpyDtoH", cuMemcpyDtoH_v2)                                           \
    X(3020, "cuMemcpyDtoHAsync", cuMemcpyDtoHAsync_v2)                                 \
    X(3020, "cuMemcpyDtoD", cuMemcpyDtoD_v2)                                           \
    X(3020, "cuMemcpyDtoDAsync", cuMemcpyDtoDAsync_v2)                                 \
    X(12000, "cuGetProcAddress", cuGetProcAddress_v2)

ENTRIES(DECLARE)

static const struct entry {
    const char *name;
    int version;
    void *function;
} entries[] = {ENTRIES(ENTRY)};

enum { FOUND = 0, SYMBOL_NOT_FOUND = 1, VERSION_NOT_SUFFICIENT = 2 };

static CUresult entry_point(const char *name, void **function, int version, int *status) {
    int best = -1, outcome = SYMBOL_NOT_FOUND;
    *function = NULL;
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        if (strcmp(entries[i].name, name) || entries[i].version > machine()->driver_version) continue;
        if (outcome == SYMBOL_NOT_FOUND) outcome = VERSION_NOT_SUFFICIENT;
        if (entries[i].version > version || entries[i].version < best) continue;
        best = entries[i].version;
        *function = entries[i].function;
        outcome = FOUND;
    }
    if (status) *status = outcome;
    return outcome == FOUND ? OK : NOT_FOUND;
}

/* No log and no faults here: bindings look up hundreds of names that are never called. */
API CUresult fake_get_proc_address(const char *name, void **function, int version, uint64_t flags, int *status)
    __asm__("cuGetProcAddress_v2");
API CUresult fake_get_proc_address(const char *name, void **function, int version, uint64_t flags, int *status) {
    (void)flags; /* legacy or per-thread default stream: the same here */
    if (!name || !function) return INVALID_VALUE;
    return entry_point(name, function, version, status);
}
API CUresult cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
    return fake_get_proc_address(name, function, version, flags, NULL);
}
