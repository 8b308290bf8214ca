/* The live segments of the overflow allocator, by address: constant time, for as many as there can be.
 *
 * A table of chains that never grows: torch's segments are 2 MiB and more, so that even 100,000 of them, 200 GB, share few
 * buckets. The caller makes the segment and holds the mutex. Part of _overflow.c. */
#include <stdint.h>

#define BUCKET_BITS 17

struct segment {
    uint64_t address, bytes;
    int32_t device, kind;
    struct segment *next; /* in the same bucket */
};

static struct segment *buckets[1 << BUCKET_BITS];

static struct segment **place_of(uint64_t address) /* where a pointer to that segment is, or would be */
{
    struct segment **at = &buckets[(address >> 9) * UINT64_C(0x9E3779B97F4A7C15) >> (64 - BUCKET_BITS)];
    while (*at && (*at)->address != address)
        at = &(*at)->next;
    return at;
}

static void put(struct segment *segment)
{
    struct segment **at = place_of(segment->address);
    segment->next = *at;
    *at = segment;
}

static struct segment *take(uint64_t address) /* NULL: there is none */
{
    struct segment **at = place_of(address), *found = *at;
    if (found)
        *at = found->next;
    return found;
}
