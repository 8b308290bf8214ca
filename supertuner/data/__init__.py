"""From files to batches: lists, probes and stages sources into an arena, then orders, decodes and batches samples."""
