/* Fills every block that torch's caching allocator returns with zeros. Loaded by the fake runtime.
 *
 * Kernels do nothing on the phantom, so their result is whatever the memory held before. In new memory these are
 * zeros; in a reused block they would be bytes of something else, such as a copied batch, and a program that
 * inspects a result (is the loss finite? was the matrix singular?) would behave differently each time. torch reports
 * each block that it returns to an attached tracker; this tracker clears it. The allocator's own behaviour (which
 * block, which segment, the statistics) is unchanged. */
#include <c10/cuda/CUDACachingAllocator.h>

extern "C" void phantom_clear(void *from, size_t count); /* libcudart_bytes.c */

extern "C" void phantom_attach(void) {
    using c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker;
    using c10::cuda::CUDACachingAllocator::TraceEntry;
    attachAllocatorTraceTracker([](const TraceEntry &entry) {
        if (entry.action_ == TraceEntry::ALLOC) phantom_clear(reinterpret_cast<void *>(entry.addr_), entry.size_);
    });
}
