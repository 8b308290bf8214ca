/* The live segments of the overflow allocator by address: a hash table with constant-time operations.
 *
 * The number of buckets is fixed: torch's segments have at least 2 MiB, so that even 100,000 of them, 200 GB, share
 * few buckets. The multiplier is 2^64 divided by the golden ratio (Fibonacci hashing; Knuth, TAOCP volume 3, section
 * 6.4), which spreads equally spaced addresses evenly. The caller allocates the segment and holds the mutex. Part of
 * _overflow.c. */
#include <stdint.h>

#define BUCKET_BITS 17

struct segment {
    uint64_t address, bytes;
    int32_t device, kind;
    struct segment *next; /* in the same bucket */
};

static struct segment *buckets[1 << BUCKET_BITS];

static struct segment **find_link(uint64_t address) /* the link that points, or would point, to that segment */
{
    struct segment **at = &buckets[(address >> 9) * UINT64_C(0x9E3779B97F4A7C15) >> (64 - BUCKET_BITS)];
    while (*at && (*at)->address != address)
        at = &(*at)->next;
    return at;
}

static void insert_segment(struct segment *segment)
{
    struct segment **at = find_link(segment->address);
    segment->next = *at;
    *at = segment;
}

static struct segment *remove_segment(uint64_t address) /* NULL: no such segment */
{
    struct segment **at = find_link(address), *found = *at;
    if (found)
        *at = found->next;
    return found;
}
