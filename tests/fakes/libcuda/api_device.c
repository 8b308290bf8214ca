/* Driver calls for devices, contexts, streams, events and errors. Asynchronous work is done immediately. */
#include "fake.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct context {
    int device;
    atomic_int retained;
};
struct stream {
    int device, priority;
    unsigned flags;
};
struct event {
    struct timespec recorded;
};

static struct context primary[MAX_DEVICES];
enum { DEEPEST = 16 };
static _Thread_local struct context *stack[DEEPEST]; /* the contexts of this thread; the last is current */
static _Thread_local int depth;

/* The handles of the NULL stream and the per-thread stream. */
static bool is_builtin(CUstream stream) { return (uintptr_t)stream <= 2; }

static struct context *current(void) { return depth ? stack[depth - 1] : NULL; }
int current_device(void) { return current() ? current()->device : -1; }

CUresult stream_device(CUstream stream, int *device) {
    if (current_device() < 0) return INVALID_CONTEXT;
    *device = is_builtin(stream) ? current_device() : stream->device;
    return OK;
}

static CUresult check(int device) { return device_exists(device) ? OK : INVALID_DEVICE; }
static CUresult have_context(void) { return current_device() < 0 ? INVALID_CONTEXT : OK; }

/* ---- the driver and its devices ---- */

static CUresult initialise(unsigned flags) {
    if (flags) return INVALID_VALUE;
    if (!machine()->devices) return NO_DEVICE;
    calls_initialised();
    for (int d = 0; d < MAX_DEVICES; d++) primary[d].device = d;
    return OK;
}
API CUresult cuInit(unsigned flags) { CALL_BEFORE_INIT("cuInit", initialise(flags), "%u", flags); }

API CUresult cuDriverGetVersion(int *version) {
    CALL_BEFORE_INIT("cuDriverGetVersion", (*version = machine()->driver_version, OK), "%d", *version);
}

API CUresult cuDeviceGetCount(int *count) { CALL("cuDeviceGetCount", (*count = machine()->devices, OK), "%d", *count); }

API CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    CALL("cuDeviceGet", (*device = ordinal, check(ordinal)), "%d", ordinal);
}

API CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    CALL("cuDeviceGetName", (snprintf(name, (size_t)length, "%s", machine()->name), check(device)), "%d", device);
}

API CUresult cuDeviceTotalMem_v2(size_t *nbytes, CUdevice device) {
    CALL("cuDeviceTotalMem", (*nbytes = machine()->gpu_bytes, check(device)), "%d", device);
}

static CUresult device_attribute(int *value, int which, int device) {
    if (!device_exists(device)) return INVALID_DEVICE;
    *value = attribute(which);
    if (which == 33) *value += device;                /* PCI bus */
    if (which == 131 && *value >= 0) *value += device; /* NUMA node of its memory */
    return which > 0 ? OK : INVALID_VALUE;
}
API CUresult cuDeviceGetAttribute(int *value, int which, CUdevice device) {
    CALL("cuDeviceGetAttribute", device_attribute(value, which, device), "%d device=%d", which, device);
}

API CUresult cuDeviceGetUuid_v2(unsigned char *uuid, CUdevice device) {
    CALL("cuDeviceGetUuid", (memset(uuid, 0xFA, 15), uuid[15] = (unsigned char)device, check(device)), "%d", device);
}
API CUresult cuDeviceGetUuid(unsigned char *uuid, CUdevice device) { return cuDeviceGetUuid_v2(uuid, device); }

API CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice device) {
    CALL("cuDeviceGetPCIBusId", (snprintf(text, (size_t)length, "0000:%02X:00.0", device + 1), check(device)), "%d", device);
}

API CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    CALL("cuDeviceCanAccessPeer", (*can = device != peer, check(device) | check(peer)), "%d %d", device, peer);
}

/* ---- contexts: only primary ones ---- */

static CUresult retain(CUcontext *context, int device) {
    if (!device_exists(device)) return INVALID_DEVICE;
    primary[device].retained++;
    *context = &primary[device];
    return OK;
}
static CUresult release(int device) {
    if (!device_exists(device)) return INVALID_DEVICE;
    if (primary[device].retained <= 0) return INVALID_CONTEXT;
    primary[device].retained--;
    return OK;
}
static CUresult primary_state(int device, unsigned *flags, int *active) {
    if (!device_exists(device)) return INVALID_DEVICE;
    *flags = 0;
    *active = primary[device].retained > 0;
    return OK;
}
API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    CALL("cuDevicePrimaryCtxRetain", retain(context, device), "%d", device);
}
API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    CALL("cuDevicePrimaryCtxRelease", release(device), "%d", device);
}
API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    CALL("cuDevicePrimaryCtxGetState", primary_state(device, flags, active), "%d", device);
}
API CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags) {
    CALL("cuDevicePrimaryCtxSetFlags", check(device), "%d %u", device, flags);
}
static CUresult push(CUcontext context) {
    if (!context || depth == DEEPEST) return INVALID_CONTEXT;
    stack[depth++] = context;
    return OK;
}
static CUresult pop(CUcontext *context) {
    if (!depth) return INVALID_CONTEXT;
    depth--;
    if (context) *context = stack[depth];
    return OK;
}
static CUresult set_current(CUcontext context) { /* replaces the current one; NULL: none */
    if (depth) depth--;
    return context ? push(context) : OK;
}
API CUresult cuCtxPushCurrent_v2(CUcontext context) {
    CALL("cuCtxPushCurrent", push(context), "%d", context ? context->device : -1);
}
API CUresult cuCtxPopCurrent_v2(CUcontext *context) { CALL("cuCtxPopCurrent", pop(context), "from %d", current_device()); }
API CUresult cuCtxSetCurrent(CUcontext context) {
    CALL("cuCtxSetCurrent", set_current(context), "%d", context ? context->device : -1);
}
API CUresult cuCtxGetCurrent(CUcontext *context) {
    CALL("cuCtxGetCurrent", (*context = current(), OK), "%d", current_device());
}
API CUresult cuCtxGetDevice(CUdevice *device) {
    CALL("cuCtxGetDevice", (*device = current_device(), have_context()), "%d", current_device());
}
API CUresult cuCtxSynchronize(void) { CALL("cuCtxSynchronize", have_context(), "device=%d", current_device()); }
API CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    CALL("cuCtxGetStreamPriorityRange", (*least = 0, *greatest = -5, have_context()), "%d", current_device());
}

/* ---- streams and events ---- */

static CUresult new_stream(CUstream *stream, unsigned flags, int priority) {
    if (current_device() < 0) return INVALID_CONTEXT;
    *stream = malloc(sizeof **stream);
    if (!*stream) return OUT_OF_MEMORY;
    **stream = (struct stream){current_device(), priority, flags};
    return OK;
}
static CUresult end_stream(CUstream stream) {
    if (is_builtin(stream)) return INVALID_HANDLE;
    free(stream);
    return OK;
}
API CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
    CALL("cuStreamCreate", new_stream(stream, flags, 0), "flags=%u device=%d", flags, current_device());
}
API CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) {
    CALL("cuStreamCreateWithPriority", new_stream(stream, flags, priority), "flags=%u priority=%d", flags, priority);
}
API CUresult cuStreamDestroy_v2(CUstream stream) { CALL("cuStreamDestroy", end_stream(stream), "%p", (void *)stream); }
API CUresult cuStreamSynchronize(CUstream stream) {
    CALL("cuStreamSynchronize", have_context(), "%s", is_builtin(stream) ? "NULL" : "own");
}
API CUresult cuStreamQuery(CUstream stream) { CALL("cuStreamQuery", have_context(), "%p", (void *)stream); }
API CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    CALL("cuStreamWaitEvent", event ? OK : INVALID_HANDLE, "%p %p %u", (void *)stream, (void *)event, flags);
}
API CUresult cuStreamGetPriority(CUstream stream, int *priority) {
    CALL("cuStreamGetPriority", (*priority = is_builtin(stream) ? 0 : stream->priority, OK), "%p", (void *)stream);
}

static CUresult new_event(CUevent *event) {
    if (current_device() < 0) return INVALID_CONTEXT;
    *event = calloc(1, sizeof **event);
    return *event ? OK : OUT_OF_MEMORY;
}
static CUresult elapsed(float *milliseconds, CUevent start, CUevent end) {
    if (!start || !end || !start->recorded.tv_sec || !end->recorded.tv_sec) return INVALID_HANDLE;
    double seconds = difftime(end->recorded.tv_sec, start->recorded.tv_sec);
    *milliseconds = (float)(seconds * 1e3 + (double)(end->recorded.tv_nsec - start->recorded.tv_nsec) / 1e6);
    return OK;
}
API CUresult cuEventCreate(CUevent *event, unsigned flags) { CALL("cuEventCreate", new_event(event), "flags=%u", flags); }
API CUresult cuEventDestroy_v2(CUevent event) { CALL("cuEventDestroy", (free(event), OK), "%p", (void *)event); }
API CUresult cuEventRecord(CUevent event, CUstream stream) {
    CALL("cuEventRecord", (clock_gettime(CLOCK_MONOTONIC, &event->recorded), OK), "%p %p", (void *)event, (void *)stream);
}
API CUresult cuEventQuery(CUevent event) { CALL("cuEventQuery", event ? OK : INVALID_HANDLE, "%p", (void *)event); }
API CUresult cuEventSynchronize(CUevent event) {
    CALL("cuEventSynchronize", event ? OK : INVALID_HANDLE, "%p", (void *)event);
}
API CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end) {
    CALL("cuEventElapsedTime", elapsed(milliseconds, start, end), "%p %p", (void *)start, (void *)end);
}
API CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent start, CUevent end) {
    return cuEventElapsedTime(milliseconds, start, end);
}

/* ---- errors ---- */

static const struct {
    CUresult code;
    const char *name, *text;
} errors[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {4, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {34, "CUDA_ERROR_STUB_LIBRARY", "CUDA driver is a stub library"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the requested memory range is already mapped"},
    {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered memory region"},
    {800, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {802, "CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver / cuda driver combination"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static CUresult describe(CUresult code, const char **name, const char **text) {
    *(name ? name : text) = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) return *(name ? name : text) = name ? errors[i].name : errors[i].text, OK;
    return INVALID_VALUE;
}
API CUresult cuGetErrorName(CUresult code, const char **name) {
    CALL_BEFORE_INIT("cuGetErrorName", describe(code, name, NULL), "%d", code);
}
API CUresult cuGetErrorString(CUresult code, const char **text) {
    CALL_BEFORE_INIT("cuGetErrorString", describe(code, NULL, text), "%d", code);
}
