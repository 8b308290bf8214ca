/* Driver calls that set advice, prefetch, discard, and read advice back: the unified memory of the fake driver.
 *
 * Two generations: until CUDA 12.1 a destination is a device number, -1 for the CPU; since 12.2 a CUmemLocation. */
#include "fake.h"

#include <string.h>

static CUmemLocation location_of(CUdevice device) {
    return device == CPU ? (CUmemLocation){AT_HOST, 0} : (CUmemLocation){AT_DEVICE, device};
}

static CUresult placed(CUmemLocation location, struct place *place) {
    if (location.type == AT_HOST_NUMA_CURRENT) location = (CUmemLocation){AT_HOST_NUMA, 0};
    *place = (struct place){(int8_t)location.type, location.type == AT_HOST ? 0 : (int8_t)location.id};
    switch (location.type) {
        case AT_DEVICE: return device_exists(location.id) && concurrent_managed() ? OK : INVALID_DEVICE;
        case AT_HOST: return OK;
        case AT_HOST_NUMA: return location.id >= 0 && location.id < machine()->host_nodes ? OK : INVALID_DEVICE;
        default: return INVALID_VALUE;
    }
}

/* ---- advice ---- */

enum { SET_READ_MOSTLY = 1, UNSET_READ_MOSTLY, SET_PREFERRED, UNSET_PREFERRED, SET_ACCESSED_BY, UNSET_ACCESSED_BY };

static CUresult advise(uintptr_t address, size_t nbytes, int advice, CUmemLocation location) {
    if (current_device() < 0) return INVALID_CONTEXT;
    if (advice < SET_READ_MOSTLY || advice > UNSET_ACCESSED_BY) return INVALID_VALUE;
    struct place place = {AT_NOTHING, 0};
    bool accessed_by = advice >= SET_ACCESSED_BY, located = accessed_by || advice == SET_PREFERRED;
    CUresult result = located ? placed(location, &place) : OK;
    if (result != OK) return result;
    if (accessed_by && place.type == AT_HOST_NUMA) return INVALID_VALUE;
    if ((result = range_movable(address, nbytes)) != OK) return result;
    pages_advise(address, nbytes, advice, place);
    return OK;
}
API CUresult cuMemAdvise_v2(CUdeviceptr address, size_t nbytes, int advice, CUmemLocation location) {
    CALL("cuMemAdvise", advise(address, nbytes, advice, location), "%#llx %zu advice=%d to=%d:%d", address, nbytes, advice,
         location.type, location.id);
}
API CUresult cuMemAdvise(CUdeviceptr address, size_t nbytes, int advice, CUdevice device) {
    return cuMemAdvise_v2(address, nbytes, advice, location_of(device));
}

/* ---- prefetch and discard ---- */

static CUresult prefetch(uintptr_t address, size_t nbytes, CUmemLocation location, CUstream stream) {
    struct place place;
    int device;
    CUresult result = stream_device(stream, &device);
    if (result == OK) result = placed(location, &place);
    if (result == OK && !concurrent_managed()) result = INVALID_DEVICE;
    if (result == OK) result = range_movable(address, nbytes);
    return result == OK ? pages_prefetch(address, nbytes, place) : result;
}
API CUresult cuMemPrefetchAsync_v2(CUdeviceptr address, size_t nbytes, CUmemLocation to, unsigned flags, CUstream stream) {
    CALL("cuMemPrefetchAsync", flags ? INVALID_VALUE : prefetch(address, nbytes, to, stream), "%#llx %zu to=%d:%d", address,
         nbytes, to.type, to.id);
}
API CUresult cuMemPrefetchAsync(CUdeviceptr address, size_t nbytes, CUdevice device, CUstream stream) {
    return cuMemPrefetchAsync_v2(address, nbytes, location_of(device), 0, stream);
}

/* The batch calls reject the NULL stream (handles 0 and 1). */
static bool is_legacy(CUstream stream) { return (uintptr_t)stream <= 1; }

static CUresult prefetch_batch(const CUdeviceptr *addresses, const size_t *sizes, size_t count, const CUmemLocation *to,
                               const size_t *firsts, size_t destinations, unsigned long long flags, CUstream stream) {
    if (flags || !count || !destinations || destinations > count || firsts[0] || is_legacy(stream)) return INVALID_VALUE;
    for (size_t k = 1; k < destinations; k++)
        if (firsts[k] <= firsts[k - 1] || firsts[k] >= count) return INVALID_VALUE;
    for (size_t i = 0, k = 0; i < count; i++) {
        while (k + 1 < destinations && firsts[k + 1] <= i) k++;
        CUresult result = prefetch(addresses[i], sizes[i], to[k], stream);
        if (result != OK) return result;
    }
    return OK;
}
API CUresult cuMemPrefetchBatchAsync(CUdeviceptr *addresses, size_t *sizes, size_t count, CUmemLocation *to, size_t *firsts,
                                     size_t destinations, unsigned long long flags, CUstream stream) {
    CALL("cuMemPrefetchBatchAsync", prefetch_batch(addresses, sizes, count, to, firsts, destinations, flags, stream),
         "count=%zu to=%d:%d", count, to ? to->type : 0, to ? to->id : 0);
}

static CUresult discard_batch(const CUdeviceptr *addresses, const size_t *sizes, size_t count, unsigned long long flags,
                              CUstream stream) {
    if (flags || !count || is_legacy(stream)) return INVALID_VALUE;
    if (!concurrent_managed()) return NOT_SUPPORTED;
    for (size_t i = 0; i < count; i++)
        if (range_movable(addresses[i], sizes[i]) != OK) return INVALID_VALUE;
    for (size_t i = 0; i < count; i++) pages_discard(addresses[i], sizes[i]);
    return OK;
}
API CUresult cuMemDiscardBatchAsync(CUdeviceptr *addresses, size_t *sizes, size_t count, unsigned long long flags,
                                    CUstream stream) {
    CALL("cuMemDiscardBatchAsync", discard_batch(addresses, sizes, count, flags, stream), "count=%zu", count);
}

static CUresult discard_and_prefetch(const CUdeviceptr *addresses, const size_t *sizes, size_t count, const CUmemLocation *to,
                                     const size_t *firsts, size_t destinations, unsigned long long flags, CUstream stream) {
    CUresult result = discard_batch(addresses, sizes, count, flags, stream);
    return result == OK ? prefetch_batch(addresses, sizes, count, to, firsts, destinations, flags, stream) : result;
}
API CUresult cuMemDiscardAndPrefetchBatchAsync(CUdeviceptr *addresses, size_t *sizes, size_t count, CUmemLocation *to,
                                               size_t *firsts, size_t destinations, unsigned long long flags,
                                               CUstream stream) {
    CALL("cuMemDiscardAndPrefetchBatchAsync",
         discard_and_prefetch(addresses, sizes, count, to, firsts, destinations, flags, stream), "count=%zu", count);
}

/* ---- reading advice back ---- */

static int device_of(struct place place) {
    return place.type == AT_DEVICE ? place.id : place.type == AT_NOTHING ? NOBODY : CPU;
}

static void list_accessors(int *out, size_t room, uint32_t accessed_by) {
    size_t n = 0;
    for (int d = 0; d < MAX_DEVICES && n < room; d++)
        if (accessed_by & 1u << d) out[n++] = d;
    if (n < room && (accessed_by & HOST_BIT)) out[n++] = CPU;
    while (n < room) out[n++] = NOBODY;
}

/* According to the documentation only managed memory has readable attributes. */
static CUresult range_attribute(void *data, size_t size, int which, uintptr_t address, size_t nbytes) {
    struct found found;
    if (!size || size % 4 || (which != 3 && size != 4)) return INVALID_VALUE;
    if (!range_at(address, &found) || range_movable(address, nbytes) != OK) return INVALID_VALUE;
    struct summary all = pages_summary(address, nbytes);
    int *out = data;
    switch (which) {
        case 1: *out = all.read_mostly; return OK;
        case 2: *out = device_of(all.preferred); return OK;
        case 3: list_accessors(out, size / 4, all.accessed_by); return OK;
        case 4: *out = device_of(all.last_prefetch); return OK;
        case 5: *out = all.preferred.type; return OK;
        case 6: *out = all.preferred.id; return OK;
        case 7: *out = all.last_prefetch.type; return OK;
        case 8: *out = all.last_prefetch.id; return OK;
        default: return INVALID_VALUE;
    }
}
API CUresult cuMemRangeGetAttribute(void *data, size_t size, int which, CUdeviceptr address, size_t nbytes) {
    CALL("cuMemRangeGetAttribute", range_attribute(data, size, which, address, nbytes), "%d %#llx %zu", which, address, nbytes);
}

static CUresult range_attributes(void **data, const size_t *sizes, const int *which, size_t count, uintptr_t address,
                                 size_t nbytes) {
    CUresult result = count ? OK : INVALID_VALUE;
    for (size_t i = 0; i < count && result == OK; i++)
        result = range_attribute(data[i], sizes[i], which[i], address, nbytes);
    return result;
}
API CUresult cuMemRangeGetAttributes(void **data, size_t *sizes, int *which, size_t count, CUdeviceptr address, size_t nbytes) {
    CALL("cuMemRangeGetAttributes", range_attributes(data, sizes, which, count, address, nbytes), "%zu %#llx %zu", count,
         address, nbytes);
}
