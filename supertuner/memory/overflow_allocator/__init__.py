"""The overflow allocator: torch's allocations spill to managed memory when GPU memory is full."""
