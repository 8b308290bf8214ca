/* Driver calls that allocate and free memory, and describe an address. */
#include "fake.h"

#include <string.h>

enum { MANAGED_MEMORY = 83 };
enum { ATTACH_GLOBAL = 1, ATTACH_HOST = 2 };

static CUresult take(enum kind kind, size_t nbytes, uintptr_t *address) {
    int device = current_device();
    return device < 0 ? INVALID_CONTEXT : range_new(kind, device, nbytes, address);
}
static CUresult take_for(CUdeviceptr *address, enum kind kind, size_t nbytes) {
    uintptr_t start = 0;
    CUresult result = take(kind, nbytes, &start);
    if (result == OK) *address = start;
    return result;
}
static CUresult take_managed(CUdeviceptr *address, size_t nbytes, unsigned flags) {
    if (flags != ATTACH_GLOBAL && flags != ATTACH_HOST) return INVALID_VALUE;
    return attribute(MANAGED_MEMORY) ? take_for(address, MANAGED, nbytes) : NOT_SUPPORTED;
}
static CUresult take_pinned(void **address, size_t nbytes) {
    uintptr_t start = 0;
    CUresult result = take(PINNED, nbytes, &start);
    if (result == OK) *address = (void *)start;
    return result;
}
static CUresult give_back(uintptr_t address, enum kind kind) {
    if (current_device() < 0) return INVALID_CONTEXT;
    return address ? range_free(address, kind) : OK;
}

API CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t nbytes) {
    CALL("cuMemAlloc", take_for(address, DEVICE, nbytes), "%zu device=%d", nbytes, current_device());
}
API CUresult cuMemAllocManaged(CUdeviceptr *address, size_t nbytes, unsigned flags) {
    CALL("cuMemAllocManaged", take_managed(address, nbytes, flags), "%zu flags=%u", nbytes, flags);
}
API CUresult cuMemFree_v2(CUdeviceptr address) { CALL("cuMemFree", give_back(address, DEVICE), "%#llx", address); }

API CUresult cuMemAllocAsync(CUdeviceptr *address, size_t nbytes, CUstream stream) {
    CALL("cuMemAllocAsync", take_for(address, DEVICE, nbytes), "%zu %p", nbytes, (void *)stream);
}
API CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
    CALL("cuMemFreeAsync", give_back(address, DEVICE), "%#llx %p", address, (void *)stream);
}

API CUresult cuMemHostAlloc(void **address, size_t nbytes, unsigned flags) {
    CALL("cuMemHostAlloc", take_pinned(address, nbytes), "%zu flags=%u", nbytes, flags);
}
API CUresult cuMemAllocHost_v2(void **address, size_t nbytes) {
    CALL("cuMemAllocHost", take_pinned(address, nbytes), "%zu", nbytes);
}
API CUresult cuMemFreeHost(void *address) { CALL("cuMemFreeHost", give_back((uintptr_t)address, PINNED), "%p", address); }

static CUresult unregister(uintptr_t address) {
    CUresult result = give_back(address, REGISTERED);
    return result == INVALID_VALUE ? NOT_REGISTERED : result;
}
API CUresult cuMemHostRegister_v2(void *address, size_t nbytes, unsigned flags) {
    CALL("cuMemHostRegister", range_adopt((uintptr_t)address, nbytes, current_device()), "%p %zu %u", address, nbytes, flags);
}
API CUresult cuMemHostUnregister(void *address) { CALL("cuMemHostUnregister", unregister((uintptr_t)address), "%p", address); }
API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *device, void *host, unsigned flags) {
    CALL("cuMemHostGetDevicePointer", (*device = (uintptr_t)host, OK), "%p %u", host, flags);
}

static CUresult memory_info(size_t *free_bytes, size_t *total) {
    int device = current_device();
    if (device < 0) return INVALID_CONTEXT;
    *total = machine()->gpu_bytes;
    *free_bytes = *total - gpu_used(device);
    return OK;
}
API CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    CALL("cuMemGetInfo", memory_info(free_bytes, total), "device=%d", current_device());
}

static CUresult address_range(CUdeviceptr *base, size_t *nbytes, uintptr_t address) {
    struct found found;
    if (!range_at(address, &found)) return NOT_FOUND;
    if (base) *base = found.base;
    if (nbytes) *nbytes = found.nbytes;
    return OK;
}
API CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *nbytes, CUdeviceptr address) {
    CALL("cuMemGetAddressRange", address_range(base, nbytes, address), "%#llx", address);
}

/* ---- describing an address ---- */

/* One attribute of CUpointer_attribute, written with the size of its type. */
static CUresult tell(void *out, int which, uintptr_t address, const struct found *found) {
    bool host = found->kind == PINNED || found->kind == REGISTERED;
    switch (which) {
        /* the context: primary, not reported */
        case 1: memset(out, 0, sizeof(void *)); return OK;
        case 2: *(unsigned *)out = host ? 1 : 2; return OK;                       /* CU_MEMORYTYPE_HOST, _DEVICE */
        case 3: *(CUdeviceptr *)out = address; return OK;                         /* as the device sees it */
        case 4:                                                                   /* as the host sees it */
            *(void **)out = found->kind == DEVICE ? NULL : (void *)address;
            return found->kind == DEVICE ? INVALID_VALUE : OK;
        case 7: *(unsigned long long *)out = found->base; return OK;              /* a number for the buffer */
        case 8: *(int *)out = found->kind == MANAGED; return OK;                  /* is it managed */
        case 9: *(int *)out = found->device; return OK;                           /* its device */
        case 10: *(int *)out = found->kind == DEVICE; return OK;                  /* can be shared by legacy IPC */
        case 11: *(CUdeviceptr *)out = found->base; return OK;                    /* range: start */
        case 12: *(size_t *)out = found->nbytes; return OK;                       /* range: size */
        case 13: *(int *)out = 1; return OK;                                      /* is it mapped */
        default: return INVALID_VALUE;
    }
}

static CUresult pointer_attribute(void *out, int which, uintptr_t address) {
    struct found found;
    return range_at(address, &found) ? tell(out, which, address, &found) : INVALID_VALUE;
}
API CUresult cuPointerGetAttribute(void *out, int which, CUdeviceptr address) {
    CALL("cuPointerGetAttribute", pointer_attribute(out, which, address), "%d %#llx", which, address);
}

/* Unlike the call above it does not fail for a pointer that CUDA does not know: all values are then zero. */
static CUresult pointer_attributes(unsigned count, const int *which, void **out, uintptr_t address) {
    struct found found;
    bool known = range_at(address, &found);
    for (unsigned i = 0; i < count; i++) {
        bool is_wide = which[i] == 1 || which[i] == 3 || which[i] == 4 || which[i] == 7 || which[i] == 11 || which[i] == 12;
        if (!known) memset(out[i], 0, is_wide ? 8 : 4);
        if (!known && which[i] == 9) *(int *)out[i] = NOBODY;
        if (known) tell(out[i], which[i], address, &found);
    }
    return OK;
}
API CUresult cuPointerGetAttributes(unsigned count, const int *which, void **out, CUdeviceptr address) {
    CALL("cuPointerGetAttributes", pointer_attributes(count, which, out, address), "%u %#llx", count, address);
}
