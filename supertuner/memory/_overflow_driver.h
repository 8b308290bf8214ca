/* The few functions of the CUDA driver that the overflow allocator calls, found when the first segment is asked for.
 *
 * No CUDA headers and nothing linked: libcuda.so.1 is opened by name. `load_error` is 0 when everything was found; else
 * `load_call` says what was not. Part of _overflow.c. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>

enum { ATTACH_GLOBAL = 1, PREFERRED_LOCATION = 3, ACCESSED_BY = 5, AT_DEVICE = 1, AT_HOST = 2 }; /* as in cuda.h */
struct location { int type, id; };

static struct {
    int (*init)(unsigned), (*version)(int *), (*device)(int *, int);
    int (*retain)(void **, int), (*current)(void **), (*make_current)(void *);
    int (*info)(size_t *, size_t *), (*allocate)(uint64_t *, size_t), (*release)(uint64_t);
    int (*allocate_managed)(uint64_t *, size_t, unsigned);
    int (*advise)(uint64_t, size_t, int, struct location); /* since CUDA 12.2 */
    int (*advise_by_number)(uint64_t, size_t, int, int);   /* before: a device, or -1 for the host */
} cuda;
static const char *load_call;
static int load_error;

static void *find(void *library, const char *name, const char *exported, int since)
{
    int (*ask)(const char *, void **, int, uint64_t, int *) = dlsym(library, "cuGetProcAddress_v2");
    void *found = NULL;
    int status = 0;
    if (ask && ask(name, &found, since, 0, &status) == 0 && found)
        return found;
    return dlsym(library, exported); /* a driver before CUDA 12 */
}

static void load(void)
{
    int version = 0;
    void *library = dlopen(load_call = "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    load_error = -1;
#define FIND(to, name, exported, since) \
    if (!library || !(cuda.to = find(library, load_call = name, exported, since))) return
    FIND(init, "cuInit", "cuInit", 2000);
    FIND(version, "cuDriverGetVersion", "cuDriverGetVersion", 2020);
    FIND(device, "cuDeviceGet", "cuDeviceGet", 2000);
    FIND(retain, "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRetain", 7000);
    FIND(current, "cuCtxGetCurrent", "cuCtxGetCurrent", 4000);
    FIND(make_current, "cuCtxSetCurrent", "cuCtxSetCurrent", 4000);
    FIND(info, "cuMemGetInfo", "cuMemGetInfo_v2", 3020);
    FIND(allocate, "cuMemAlloc", "cuMemAlloc_v2", 3020);
    FIND(release, "cuMemFree", "cuMemFree_v2", 3020);
    FIND(allocate_managed, "cuMemAllocManaged", "cuMemAllocManaged", 6000);
#undef FIND
    load_call = "cuInit";
    if ((load_error = cuda.init(0)) || (load_error = cuda.version(&version)))
        return;
    if (version >= 12020) /* only then: asked for the newer form, an older driver might give the older one */
        cuda.advise = find(library, "cuMemAdvise", "cuMemAdvise_v2", 12020);
    else
        cuda.advise_by_number = find(library, "cuMemAdvise", "cuMemAdvise", 8000);
}

static int advise(uint64_t address, uint64_t bytes, int advice, struct location where)
{
    if (cuda.advise)
        return cuda.advise(address, bytes, advice, where);
    if (cuda.advise_by_number)
        return cuda.advise_by_number(address, bytes, advice, where.type == AT_HOST ? -1 : where.id);
    return -1;
}
