"""From files to batches: lists and probes sources, stages them into an arena, then orders, decodes and batches samples."""
