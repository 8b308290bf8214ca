/* Ranges, pages, and the rules of page migration.
 *
 * - Device memory is on its GPU from the start and never moves.
 * - Managed memory is populated where it is first touched or prefetched to, migrates on touches and prefetches, and is
 *   evicted to the host, least recently used first, when its GPU is full.
 * - System memory is not allocated here and known only by what the GPU did with it. It migrates to the GPU and is never
 *   evicted.
 * - Pinned memory is in host memory.
 *
 * Ranges are in a balanced tree (100,000 of them must not be slow), managed pages in an array per range, system
 * pages in a hash table. One lock guards everything. */
#define _GNU_SOURCE
#include "fake.h"

#include <errno.h>
#include <search.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct page {
    struct page *newer, *older; /* in its GPU's list of evictable pages; NULL: not in a list */
    struct place home, preferred, last_prefetch;
    uint32_t accessed_by;
    bool read_mostly;
    bool counted; /* counted in the memory of its GPU, or of the pool */
};
struct range {
    uintptr_t base;
    size_t nbytes, reserved;
    enum kind kind;
    int device;
    struct page *pages; /* MANAGED */
};
struct system_page {
    struct system_page *next;
    uintptr_t number;
    struct page page;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void *ranges;
static struct system_page **system_pages;
static size_t system_buckets, system_count;
static size_t used[MAX_DEVICES], evicted;
static struct page lists[MAX_DEVICES]; /* sentinels: .newer is the oldest page, .older the newest */

__attribute__((constructor)) static void empty_lists(void) {
    for (int d = 0; d < MAX_DEVICES; d++) lists[d].newer = lists[d].older = &lists[d];
}

static bool same(struct place a, struct place b) {
    if (a.type != b.type) return false;
    return a.type == AT_HOST || a.type == AT_NOTHING || a.id == b.id;
}
static bool on_gpu(const struct page *page) { return page->home.type == AT_DEVICE; }
static size_t rounded(size_t nbytes) {
    size_t page = machine()->page_bytes;
    return (nbytes + page - 1) / page * page;
}
/* A pool that CPU and GPU share is counted once, for every device. */
static int account(int device) { return machine()->one_pool ? 0 : device; }

/* ---- ranges ---- */

/* Ranges never overlap, so the comparison "overlaps" serves as "equal": a search for one byte finds the range that
 * contains it. */
static int by_address(const void *a, const void *b) {
    const struct range *x = a, *y = b;
    return x->base + x->nbytes <= y->base ? -1 : y->base + y->nbytes <= x->base ? 1 : 0;
}

static struct range *latest; /* most look-ups have the same result as the last one */

static struct range *range_around(uintptr_t address) {
    if (latest && address - latest->base < latest->nbytes) return latest;
    struct range key = {.base = address, .nbytes = 1};
    struct range **found = tfind(&key, &ranges, by_address);
    if (found) latest = *found;
    return found ? *found : NULL;
}

static void *reserve(size_t nbytes) {
    size_t page = machine()->page_bytes;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char *start = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (start == MAP_FAILED || (uintptr_t)start % page == 0) return start == MAP_FAILED ? NULL : start;
    munmap(start, nbytes);
    start = mmap(NULL, nbytes + page, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (start == MAP_FAILED) return NULL;
    size_t before = (page - (uintptr_t)start % page) % page;
    if (before) munmap(start, before);
    if (page - before) munmap(start + before + nbytes, page - before);
    return start + before;
}

/* ---- pages ---- */

static void unlist(struct page *page) {
    if (!page->newer) return;
    page->newer->older = page->older;
    page->older->newer = page->newer;
    page->newer = page->older = NULL;
}

static void make_newest(struct page *page, int device) {
    unlist(page);
    struct page *end = &lists[device];
    page->older = end->older;
    page->newer = end;
    end->older->newer = page;
    end->older = page;
}

static void leave(struct page *page) { /* its location, and with it the memory count of the GPU */
    if (page->counted) used[account(page->home.id)] -= machine()->page_bytes;
    page->counted = false;
    unlist(page);
    page->home = (struct place){AT_NOTHING, 0};
}

static bool in_core(uintptr_t address) {
    size_t host_page = (size_t)sysconf(_SC_PAGESIZE);
    for (size_t offset = 0; offset < machine()->page_bytes; offset += host_page) {
        unsigned char present = 0;
        if (mincore((void *)(address + offset), host_page, &present) == 0 && (present & 1)) return true;
    }
    return false;
}

static uintptr_t page_number(uintptr_t address) { return address / machine()->page_bytes; }
static struct system_page **bucket(uintptr_t number) {
    return &system_pages[(number * 0x9E3779B97F4A7C15u >> 20) % system_buckets];
}

static void grow_system_table(void) {
    struct system_page **old = system_pages;
    size_t old_buckets = system_buckets;
    system_buckets = old_buckets ? old_buckets * 4 : 1024;
    system_pages = calloc(system_buckets, sizeof *system_pages);
    if (!system_pages) abort();
    for (size_t i = 0; i < old_buckets; i++)
        for (struct system_page *entry = old[i], *next; entry; entry = next) {
            next = entry->next;
            struct system_page **head = bucket(entry->number);
            entry->next = *head;
            *head = entry;
        }
    free(old);
}

/* The process may have freed system memory without the driver seeing it; a page that the kernel no longer has is
 * nowhere. (Memory that was freed and allocated again for something else is mistaken for the old memory: tests reset
 * everything between them.) */
static void forget_system_pages(bool all) {
    for (size_t i = 0; i < system_buckets; i++)
        for (struct system_page **link = &system_pages[i]; *link;) {
            struct system_page *entry = *link;
            if (!all && in_core(entry->number * machine()->page_bytes)) {
                link = &entry->next;
                continue;
            }
            leave(&entry->page);
            *link = entry->next;
            free(entry);
            system_count--;
        }
}

static struct page *system_page(uintptr_t address) {
    if (system_count >= system_buckets) grow_system_table();
    uintptr_t number = page_number(address);
    struct system_page **head = bucket(number), *entry = *head;
    while (entry && entry->number != number) entry = entry->next;
    if (!entry) {
        entry = calloc(1, sizeof *entry);
        if (!entry) abort();
        entry->number = number;
        entry->next = *head;
        *head = entry;
        system_count++;
    }
    bool present = in_core(number * machine()->page_bytes);
    if (!present) {
        leave(&entry->page);
        entry->page = (struct page){.preferred = entry->page.preferred};
    } else if (entry->page.home.type == AT_NOTHING) {
        entry->page.home = (struct place){AT_HOST, 0};
    }
    return &entry->page;
}

/* NULL: memory whose pages do not move. `system` returns whether the page is system memory. */
static struct page *page_at(uintptr_t address, bool *system) {
    struct range *range = range_around(address);
    *system = !range;
    if (range) return range->pages ? &range->pages[(address - range->base) / machine()->page_bytes] : NULL;
    return pageable() ? system_page(address) : NULL;
}

/* System pages must exist in the kernel when they are placed: `in_core` would treat a page that the kernel never saw
 * as freed. */
static void populate(uintptr_t address) {
    volatile unsigned char *byte = (volatile unsigned char *)address;
    *byte = *byte;
}

static bool swept; /* during this call: a second query would find nothing new, and takes time */

static void enter(void) {
    pthread_mutex_lock(&lock);
    swept = false;
}

static bool make_room(int device, size_t nbytes) {
    int pool = account(device);
    while (used[pool] + nbytes > machine()->gpu_bytes) {
        struct page *oldest = lists[pool].newer;
        if (!machine()->one_pool && oldest != &lists[pool]) {
            leave(oldest);
            oldest->home = (struct place){AT_HOST, 0};
            evicted += machine()->page_bytes;
        } else if (!swept) {
            forget_system_pages(false);
            swept = true;
        } else {
            return false;
        }
    }
    return true;
}

/* In one pool an existing page is where everything is: it only takes memory when it is populated. */
static bool move_in_pool(struct page *page, bool system) {
    if (page->home.type != AT_NOTHING || system) return true;
    if (!make_room(0, machine()->page_bytes)) return false;
    page->home = (struct place){AT_HOST, 0};
    page->counted = true;
    used[0] += machine()->page_bytes;
    return true;
}

static bool move(struct page *page, struct place to, bool system) {
    if (machine()->one_pool) return move_in_pool(page, system);
    if (same(page->home, to)) {
        if (page->newer) make_newest(page, page->home.id);
        return true;
    }
    unlist(page); /* it must not be evicted to make room for itself */
    if (to.type == AT_DEVICE && !make_room(to.id, machine()->page_bytes)) {
        if (on_gpu(page) && !system) make_newest(page, page->home.id);
        return false;
    }
    leave(page);
    page->home = to;
    page->counted = to.type == AT_DEVICE;
    if (page->counted) used[to.id] += machine()->page_bytes;
    if (page->counted && !system) make_newest(page, to.id);
    return true;
}

#define EACH_PAGE(at, address, nbytes)                                                              \
    for (uintptr_t at = page_number(address) * machine()->page_bytes; at < (address) + (nbytes); \
         at += machine()->page_bytes)

/* ---- called by the other files of the fake driver ---- */

static CUresult range_make(enum kind kind, int device, size_t nbytes, uintptr_t *address) {
    if (kind == DEVICE && !make_room(device, rounded(nbytes))) return OUT_OF_MEMORY;
    /* Without concurrent access nothing is evicted on a fault: managed memory must fit when it is allocated. */
    bool must_fit = kind == MANAGED && !concurrent_managed();
    if (must_fit && used[account(device)] + rounded(nbytes) > machine()->gpu_bytes) return OUT_OF_MEMORY;
    struct range *range = calloc(1, sizeof *range);
    void *start = range ? reserve(rounded(nbytes)) : NULL;
    if (!start) return free(range), OUT_OF_MEMORY;
    *range = (struct range){(uintptr_t)start, nbytes, rounded(nbytes), kind, device, NULL};
    if (kind == MANAGED) range->pages = calloc(range->reserved / machine()->page_bytes, sizeof *range->pages);
    if ((kind == MANAGED && !range->pages) || !tsearch(range, &ranges, by_address)) abort();
    if (kind == DEVICE) used[account(device)] += range->reserved;
    *address = range->base;
    return OK;
}

CUresult range_new(enum kind kind, int device, size_t nbytes, uintptr_t *address) {
    if (!nbytes || nbytes > SIZE_MAX / 4) return nbytes ? OUT_OF_MEMORY : INVALID_VALUE;
    enter();
    CUresult result = range_make(kind, device, nbytes, address);
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult range_adopt(uintptr_t address, size_t nbytes, int device) {
    if (!address || !nbytes) return INVALID_VALUE;
    struct range *range = malloc(sizeof *range);
    if (!range) abort();
    *range = (struct range){address, nbytes, 0, REGISTERED, device, NULL};
    pthread_mutex_lock(&lock);
    struct range **stored = tsearch(range, &ranges, by_address);
    bool taken = stored && *stored != range;
    pthread_mutex_unlock(&lock);
    if (taken) free(range);
    return taken ? ALREADY_REGISTERED : OK;
}

CUresult range_free(uintptr_t address, enum kind kind) {
    pthread_mutex_lock(&lock);
    struct range *range = range_around(address);
    bool ours = range && range->base == address && (range->kind == kind || (kind == DEVICE && range->kind == MANAGED));
    if (ours) {
        tdelete(range, &ranges, by_address);
        latest = NULL;
        for (size_t i = 0; range->pages && i < range->reserved / machine()->page_bytes; i++) leave(&range->pages[i]);
        if (range->kind == DEVICE) used[account(range->device)] -= range->reserved;
        if (range->reserved) munmap((void *)range->base, range->reserved);
        free(range->pages);
        free(range);
    }
    pthread_mutex_unlock(&lock);
    return ours ? OK : INVALID_VALUE;
}

bool range_at(uintptr_t address, struct found *found) {
    pthread_mutex_lock(&lock);
    struct range *range = range_around(address);
    if (range) *found = (struct found){range->kind, range->device, range->base, range->nbytes};
    else *found = (struct found){.kind = SYSTEM, .device = NOBODY};
    pthread_mutex_unlock(&lock);
    return range != NULL;
}

CUresult range_movable(uintptr_t address, size_t nbytes) {
    struct found found;
    if (!nbytes || !address) return INVALID_VALUE;
    if (!range_at(address, &found)) {
        size_t host_page = (size_t)sysconf(_SC_PAGESIZE);
        uintptr_t start = address / host_page * host_page;
        /* "a valid, host-accessible region": every page of it is mapped */
        return pageable() && msync((void *)start, address + nbytes - start, MS_ASYNC) == 0 ? OK : INVALID_VALUE;
    }
    if (found.kind != MANAGED) return INVALID_VALUE;
    return address + nbytes <= found.base + rounded(found.nbytes) ? OK : INVALID_VALUE;
}

void pages_advise(uintptr_t address, size_t nbytes, int advice, struct place place) {
    uint32_t bit = place.type == AT_DEVICE ? 1u << place.id : HOST_BIT;
    bool system;
    pthread_mutex_lock(&lock);
    EACH_PAGE(at, address, nbytes) {
        struct page *page = page_at(at, &system);
        /* With the host's page tables a GPU has no separate mappings or copies: such advice has no effect. */
        bool without_effect = system && attribute(100) && advice != 3 && advice != 4;
        if (!page || without_effect) continue;
        switch (advice) {
            case 1: page->read_mostly = true; break;
            case 2: page->read_mostly = false; break;
            case 3: page->preferred = place; break;
            case 4: page->preferred = (struct place){AT_NOTHING, 0}; break;
            case 5: page->accessed_by |= bit; break;
            case 6: page->accessed_by &= ~bit; break;
        }
    }
    pthread_mutex_unlock(&lock);
}

CUresult pages_prefetch(uintptr_t address, size_t nbytes, struct place place) {
    bool fits = true, system;
    enter();
    EACH_PAGE(at, address, nbytes) {
        struct range *range = range_around(at);
        if (!range) populate(at < address ? address : at);
        struct page *page = page_at(at, &system);
        if (!page) continue;
        page->last_prefetch = place;
        fits &= move(page, place, system);
    }
    pthread_mutex_unlock(&lock);
    return fits ? OK : OUT_OF_MEMORY;
}

void pages_discard(uintptr_t address, size_t nbytes) {
    bool system;
    pthread_mutex_lock(&lock);
    EACH_PAGE(at, address, nbytes) {
        struct page *page = page_at(at, &system);
        if (page && !system) leave(page);
    }
    pthread_mutex_unlock(&lock);
}

/* Where a page is after `device` uses it (CPU: the host). Preferred locations and mappings keep pages in place as
 * long as the user can access them there: a GPU can access host memory, a CPU can access GPU memory only with direct
 * access. */
static struct place attracted(const struct page *page, int device, bool system) {
    bool cpu = device == CPU, direct = attribute(101) || machine()->one_pool || system;
    struct place here = cpu ? (struct place){AT_HOST, 0} : (struct place){AT_DEVICE, (int8_t)device};
    bool reachable = page->preferred.type != AT_DEVICE || (cpu ? direct : page->preferred.id == device);
    if (page->home.type == AT_NOTHING) return page->preferred.type != AT_NOTHING && reachable ? page->preferred : here;
    if (cpu) return on_gpu(page) && !direct ? here : page->home;
    bool mapped = page->accessed_by & 1u << device; /* peer GPUs can access each other's memory */
    bool preferred = same(page->home, page->preferred) || page->preferred.type == AT_HOST;
    return mapped || (!on_gpu(page) && preferred) ? page->home : here;
}

void pages_touch(uintptr_t address, size_t nbytes, int device) {
    bool system;
    enter();
    EACH_PAGE(at, address, nbytes) {
        struct page *page = page_at(at, &system);
        if (!page) continue;
        struct place place = attracted(page, device, system);
        if (system) populate(at < address ? address : at);
        /* A full GPU does not fail a touch: the page is used in place. */
        if (!move(page, place, system) && page->home.type == AT_NOTHING) move(page, (struct place){AT_HOST, 0}, system);
    }
    pthread_mutex_unlock(&lock);
}

struct summary pages_summary(uintptr_t address, size_t nbytes) {
    struct summary all = {.accessed_by = ~0u, .read_mostly = true};
    const struct place nothing = {AT_NOTHING, 0};
    bool first = true, system;
    pthread_mutex_lock(&lock);
    EACH_PAGE(at, address, nbytes) {
        struct page *page = page_at(at, &system);
        if (!page) continue;
        if (first) all.preferred = page->preferred, all.last_prefetch = page->last_prefetch;
        if (!same(all.preferred, page->preferred)) all.preferred = nothing;
        if (!same(all.last_prefetch, page->last_prefetch)) all.last_prefetch = nothing;
        all.accessed_by &= page->accessed_by;
        all.read_mostly &= page->read_mostly;
        first = false;
    }
    pthread_mutex_unlock(&lock);
    return first ? (struct summary){0} : all;
}

struct place page_home(uintptr_t address) {
    struct place home = {AT_NOTHING, 0};
    bool system;
    pthread_mutex_lock(&lock);
    struct range *range = range_around(address);
    struct page *page = page_at(address, &system);
    if (page) home = page->home;
    else if (range) home = (struct place){range->kind == DEVICE ? AT_DEVICE : AT_HOST, (int8_t)range->device};
    else if (in_core(page_number(address) * machine()->page_bytes)) home.type = AT_HOST;
    pthread_mutex_unlock(&lock);
    return home;
}

size_t pages_at(uintptr_t address, size_t nbytes, struct place place) {
    size_t total = 0;
    EACH_PAGE(at, address, nbytes) {
        struct place home = page_home(at < address ? address : at);
        if (home.type == AT_HOST_NUMA && place.type == AT_HOST) home.type = AT_HOST;
        uintptr_t end = at + machine()->page_bytes, last = address + nbytes;
        if (same(home, place)) total += (end < last ? end : last) - (at < address ? address : at);
    }
    return total;
}

size_t gpu_used(int device) {
    pthread_mutex_lock(&lock);
    forget_system_pages(false);
    size_t bytes = used[account(device)];
    pthread_mutex_unlock(&lock);
    return bytes;
}

size_t gpu_evicted(void) { return evicted; }
void pages_reset(void) {
    pthread_mutex_lock(&lock);
    forget_system_pages(true);
    evicted = 0;
    pthread_mutex_unlock(&lock);
}
