/* The few CUDA driver functions that the overflow allocator calls, looked up at the first request, and the context
 * that they are called in.
 *
 * There are no CUDA headers and nothing is linked: libcuda.so.1 is opened by name, and a versioned function name has
 * one permanent signature. `load_error` is 0 if everything was found; otherwise `load_call` names what was missing.
 * Part of _overflow.c. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

enum { ATTACH_GLOBAL = 1, PREFERRED_LOCATION = 3, ACCESSED_BY = 5, AT_DEVICE = 1, AT_HOST = 2 }; /* as in cuda.h */
struct location { int type, id; };

static struct {
    int (*init)(unsigned), (*version)(int *), (*device)(int *, int);
    int (*retain)(void **, int), (*current)(void **), (*make_current)(void *);
    int (*info)(size_t *, size_t *), (*allocate)(uint64_t *, size_t), (*release)(uint64_t);
    int (*allocate_managed)(uint64_t *, size_t, unsigned);
    int (*advise)(uint64_t, size_t, int, struct location); /* since CUDA 12.2 */
    int (*advise_by_number)(uint64_t, size_t, int, int);   /* before CUDA 12.2: a device, or -1 for the host */
} cuda;
static const char *load_call;
static int load_error;

static void load_driver(void)
{
    int version = 0;
    void *library = dlopen(load_call = "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    load_error = -1;
#define FIND(to, name) \
    if (!library || !(cuda.to = dlsym(library, load_call = name))) return
    FIND(init, "cuInit");
    FIND(version, "cuDriverGetVersion");
    FIND(device, "cuDeviceGet");
    FIND(retain, "cuDevicePrimaryCtxRetain");
    FIND(current, "cuCtxGetCurrent");
    FIND(make_current, "cuCtxSetCurrent");
    FIND(info, "cuMemGetInfo_v2");
    FIND(allocate, "cuMemAlloc_v2");
    FIND(release, "cuMemFree_v2");
    FIND(allocate_managed, "cuMemAllocManaged");
#undef FIND
    load_call = "cuInit";
    if ((load_error = cuda.init(0)) || (load_error = cuda.version(&version)))
        return;
    if (version >= 12020)
        cuda.advise = dlsym(library, "cuMemAdvise_v2");
    else
        cuda.advise_by_number = dlsym(library, "cuMemAdvise");
}

typedef _Atomic(void *) context;
struct contexts { void *ours, *before; };

/* Make the device's primary context, which torch uses as well, current, and cache it in `known`. Returns 0, or the
 * driver's code of the failed `call`; then nothing was changed. */
static int enter_context(context *known, int device, struct contexts *contexts, const char **call)
{
    int handle = 0, code = load_error;
    *call = load_call;
    *contexts = (struct contexts){.ours = atomic_load(known)};
    if (!code && !contexts->ours) {
        *call = "cuDeviceGet", code = cuda.device(&handle, device);
        if (!code)
            *call = "cuDevicePrimaryCtxRetain", code = cuda.retain(&contexts->ours, handle);
        if (!code)
            atomic_store(known, contexts->ours);
    }
    if (!code)
        *call = "cuCtxGetCurrent", code = cuda.current(&contexts->before);
    if (!code && contexts->before != contexts->ours)
        *call = "cuCtxSetCurrent", code = cuda.make_current(contexts->ours);
    return code;
}

static void leave_context(struct contexts contexts)
{
    if (contexts.before != contexts.ours)
        cuda.make_current(contexts.before);
}

static int advise(uint64_t address, uint64_t bytes, int advice, struct location where)
{
    if (cuda.advise)
        return cuda.advise(address, bytes, advice, where);
    if (cuda.advise_by_number)
        return cuda.advise_by_number(address, bytes, advice, where.type == AT_HOST ? -1 : where.id);
    return -1;
}
