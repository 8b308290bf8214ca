/* Makes every block that torch's caching allocator hands out start as zeros. Loaded by the fake runtime.
 *
 * Kernels do nothing on the phantom, so the result of one is whatever its memory held before. In fresh memory that is
 * zeros; in a block that was used and freed it would be the bytes of something else, such as a copied batch, and a
 * program that looks at a result (is the loss finite? was the matrix singular?) would see another thing each time.
 * torch reports each block that it hands out to whoever attaches a tracker; this one clears it. The allocator's own
 * doing (which block, which segment, the statistics) is not touched.
 */
#include <c10/cuda/CUDACachingAllocator.h>

extern "C" void phantom_clear(void *from, size_t count); /* libcudart_bytes.c */

extern "C" void phantom_attach(void) {
    using c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker;
    using c10::cuda::CUDACachingAllocator::TraceEntry;
    attachAllocatorTraceTracker([](const TraceEntry &entry) {
        if (entry.action_ == TraceEntry::ALLOC) phantom_clear(reinterpret_cast<void *>(entry.addr_), entry.size_);
    });
}
