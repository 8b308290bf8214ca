/* Streams and events of the fake CUDA runtime: those of the fake driver, so that both interfaces share them.
 *
 * Work is complete when the call returns, so nothing is ever pending. Each stream has a distinct address, as in
 * CUDA, because the caching allocator keys its blocks by it. Elapsed times are host time. Graph capture is not
 * supported: its functions are generated and report that; the functions here only report that no capture is active. */
#define _GNU_SOURCE
#include "libcudart.h"

/* ---- streams ---- */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    cudaError_t error = use_device();
    return error != cudaSuccess ? error : from_driver(cuStreamCreateWithPriority(stream, flags, priority));
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithFlags(stream, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return from_driver(cuStreamDestroy(stream)); }

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    cudaError_t error = use_device();
    return error != cudaSuccess ? error : from_driver(cuStreamGetPriority(stream, priority));
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    cudaError_t error = use_device();
    return error != cudaSuccess ? error : from_driver(cuCtxGetStreamPriorityRange(least, greatest));
}

cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    return from_driver(cuStreamWaitEvent(stream, event, flags));
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    function(data);
    return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void *data, unsigned flags) {
    callback(stream, cudaSuccess, data);
    return cudaSuccess;
}

/* ---- capture: never active ---- */

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **dependencies,
                                     const cudaGraphEdgeData **edges, size_t *count) {
    *status = cudaStreamCaptureStatusNone;
    if (id != NULL) *id = 0;
    if (count != NULL) *count = 0;
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return cudaSuccess; }

/* ---- events ---- */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    cudaError_t error = use_device();
    return error != cudaSuccess ? error : from_driver(cuEventCreate(event, flags));
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return from_driver(cuEventDestroy(event)); }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return from_driver(cuEventRecord(event, stream)); }

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    return cudaEventRecord(event, stream);
}

cudaError_t cudaEventQuery(cudaEvent_t event) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    fakecuda_said("cudaEventSynchronize %p", (void *)event);
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end) {
    return from_driver(cuEventElapsedTime(milliseconds, begin, end));
}
