"""Batches in managed memory that CPU and GPU share: the buffers, and tensors over memory torch did not allocate."""
