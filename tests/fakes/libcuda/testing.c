/* Functions for tests: inspecting the fake driver and injecting errors. */
#include "fake.h"

#include <errno.h>

/* Locations as device numbers: a GPU, -1 the host, -2 not populated. */
static struct place home(int device) {
    return (struct place){device >= 0 ? AT_DEVICE : device == CPU ? AT_HOST : AT_NOTHING, (int8_t)(device < 0 ? 0 : device)};
}

API size_t fakecuda_resident_bytes(uintptr_t address, size_t nbytes, int device) {
    return pages_at(address, nbytes, home(device));
}
API size_t fakecuda_evicted_bytes(void) { return gpu_evicted(); }
API size_t fakecuda_hbm_used(int device) { return gpu_used(device); }
API void fakecuda_fault(const char *name, int code, long from, long times) { call_fault(name, code, from, times); }
API long fakecuda_calls(const char *name) { return call_count(name); }

/* Resets faults, counts, and which system memory was on a GPU. Allocated memory stays allocated. */
API void fakecuda_reset(void) {
    calls_reset();
    pages_reset();
}

/* The host used managed memory, which the fake driver cannot observe. */
API void fakecuda_host_touch(uintptr_t address, size_t nbytes) { pages_touch(address, nbytes, CPU); }
API void fakecuda_gpu_touch(uintptr_t address, size_t nbytes, int device) { pages_touch(address, nbytes, device); }

/* move_pages(2) in its query form, with the pages of a GPU on the NUMA node that the device attribute names. */
API long fakecuda_move_pages(int pid, unsigned long count, void **pages, const int *nodes, int *status, int flags) {
    enum { NUMA_ID = 131 };
    (void)flags;
    if (pid || nodes) return -EPERM;
    for (unsigned long i = 0; i < count; i++) {
        struct place place = page_home((uintptr_t)pages[i]);
        bool is_node = attribute(NUMA_ID) >= 0;
        status[i] = place.type == AT_NOTHING ? -ENOENT
                    : place.type == AT_DEVICE ? (is_node ? attribute(NUMA_ID) + place.id : -EFAULT)
                    : place.type == AT_HOST_NUMA ? place.id
                                                 : 0;
    }
    return 0;
}
