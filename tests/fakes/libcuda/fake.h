/* A fake CUDA driver (libcuda.so.1) for tests: declarations that its files share.
 *
 * It tracks pages instead of driving a GPU: memory is ordinary memory of the process (reserved, not populated), and
 * for each page the fake knows where it would be. Calls return what the documentation of CUDA 13 specifies. There
 * are no CUDA headers: the types below have the driver's ABI.
 *
 *   calls.c      every call passes through here: initialised? forked? injected error? counted, and written to the log
 *   machine.c    the emulated machine: profiles and device attributes, from FAKECUDA_* in the environment
 *   pages.c      ranges, pages, and the rules of page migration
 *   api_device.c, api_memory.c, api_advice.c, api_copy.c    the driver calls, each a few lines over the files above
 *   entry.c      cuGetProcAddress: name and version -> function. A new call needs a line there.
 *   testing.c    functions that only tests call: fakecuda_* */
#ifndef FAKE_H
#define FAKE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct context *CUcontext;
typedef struct stream *CUstream;
typedef struct event *CUevent;
typedef struct {
    int type, id;
} CUmemLocation; /* eight bytes, passed by value in one register */

#define API __attribute__((visibility("default")))

enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    NOT_SUPPORTED = 801,
};
enum { AT_NOTHING = 0, AT_DEVICE = 1, AT_HOST = 2, AT_HOST_NUMA = 3, AT_HOST_NUMA_CURRENT = 4 };
enum { CPU = -1, NOBODY = -2 }; /* CU_DEVICE_CPU and CU_DEVICE_INVALID, where a device number is expected */
enum { MAX_DEVICES = 8 };

/* ---- calls.c ---- */

/* One driver call by its name without the version: cuMemFree_v2 is "cuMemFree" for faults, counts and the log. */
struct call;
CUresult call_begin(struct call *_Atomic *slot, const char *name, bool needs_init);
CUresult call_end(struct call *call, CUresult result, const char *format, ...) __attribute__((format(printf, 3, 4)));
long call_count(const char *name);
void call_fault(const char *name, CUresult code, long from, long times);
void calls_reset(void);
void calls_initialised(void);

/* The body of a driver call: `does` runs unless a test injected an error. The remaining arguments are for the log. */
#define CALL_AS(name, needs_init, does, ...)                         \
    do {                                                             \
        static struct call *_Atomic slot;                            \
        CUresult result = call_begin(&slot, name, needs_init);       \
        if (result == OK) result = (does);                           \
        return call_end(slot, result, __VA_ARGS__);                  \
    } while (0)
#define CALL(name, does, ...) CALL_AS(name, true, does, __VA_ARGS__)
#define CALL_BEFORE_INIT(name, does, ...) CALL_AS(name, false, does, __VA_ARGS__)

/* ---- machine.c ---- */

struct machine {
    const char *profile, *name;
    int devices, driver_version, host_nodes;
    size_t gpu_bytes, page_bytes;
    bool one_pool; /* CPU and GPU share one memory: nothing moves, nothing is evicted */
};
const struct machine *machine(void);
int attribute(int which); /* the same for every device, except those that name it */
bool device_exists(int device);
bool concurrent_managed(void);
bool pageable(void);

/* ---- pages.c: every function takes the one lock itself ---- */

enum kind { DEVICE, MANAGED, PINNED, REGISTERED, SYSTEM };
struct found { /* the known facts about an address */
    enum kind kind;
    int device;
    uintptr_t base;
    size_t nbytes;
};
struct place {
    int8_t type, id; /* AT_… and its number; a page that was never touched is AT_NOTHING */
};
struct summary { /* the values common to all pages of a range, as cuMemRangeGetAttribute returns them */
    struct place preferred, last_prefetch;
    uint32_t accessed_by; /* one bit for each device, HOST_BIT for the CPU */
    bool read_mostly;
};
#define HOST_BIT (1u << 31)

CUresult range_new(enum kind kind, int device, size_t nbytes, uintptr_t *address);
CUresult range_adopt(uintptr_t address, size_t nbytes, int device); /* cuMemHostRegister */
CUresult range_free(uintptr_t address, enum kind kind);             /* DEVICE frees MANAGED too, as cuMemFree does */
bool range_at(uintptr_t address, struct found *found);
CUresult range_movable(uintptr_t address, size_t nbytes); /* OK: managed, or system memory that the GPU can access */

void pages_advise(uintptr_t address, size_t nbytes, int advice, struct place place);
CUresult pages_prefetch(uintptr_t address, size_t nbytes, struct place place);
void pages_discard(uintptr_t address, size_t nbytes);
void pages_touch(uintptr_t address, size_t nbytes, int device); /* by a GPU, or by the CPU */
struct summary pages_summary(uintptr_t address, size_t nbytes);
struct place page_home(uintptr_t address);
size_t pages_at(uintptr_t address, size_t nbytes, struct place place); /* bytes */

size_t gpu_used(int device);
size_t gpu_evicted(void);
void pages_reset(void);

/* ---- api_device.c ---- */

int current_device(void); /* of the calling thread; -1: no context */
CUresult stream_device(CUstream stream, int *device);

#endif
