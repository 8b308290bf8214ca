/* The live segments of the overflow allocator, by address: constant time however many there are.
 *
 * Open addressing, at most half full, doubled when it would be more; deletion shifts back what follows, so there is never
 * anything to clean up. A place is booked before memory is asked for: once there is memory, nothing here can fail. The
 * caller holds the mutex. Part of _overflow.c. */
#include <stdint.h>
#include <stdlib.h>

struct segment { uint64_t address, bytes; int32_t device, kind; };

static struct segment *slots;
static uint64_t mask, live; /* live counts what is booked too */

static uint64_t slot_of(uint64_t address) { return (address >> 9) * UINT64_C(0x9E3779B97F4A7C15) >> 20 & mask; }

static void put(struct segment segment)
{
    uint64_t at = slot_of(segment.address);
    while (slots[at].address)
        at = (at + 1) & mask;
    slots[at] = segment;
}

static int book_slot(void)
{
    if (!slots || 2 * (live + 1) > mask) {
        uint64_t before = slots ? mask + 1 : 0, after = before ? 2 * before : 1024;
        struct segment *old = slots, *larger = calloc(after, sizeof *larger);
        if (!larger)
            return 0;
        slots = larger;
        mask = after - 1;
        for (uint64_t i = 0; i < before; i++)
            if (old[i].address)
                put(old[i]);
        free(old);
    }
    live++;
    return 1;
}

static void unbook_slot(void) { live--; }

static struct segment *look_up(uint64_t address)
{
    if (address && slots)
        for (uint64_t at = slot_of(address); slots[at].address; at = (at + 1) & mask)
            if (slots[at].address == address)
                return &slots[at];
    return NULL;
}

static struct segment take(struct segment *found)
{
    struct segment taken = *found;
    uint64_t hole = (uint64_t)(found - slots);
    for (uint64_t at = (hole + 1) & mask; slots[at].address; at = (at + 1) & mask)
        if (((at - slot_of(slots[at].address)) & mask) >= ((at - hole) & mask)) { /* its search passes over the hole */
            slots[hole] = slots[at];
            hole = at;
        }
    slots[hole].address = 0;
    live--;
    return taken;
}
