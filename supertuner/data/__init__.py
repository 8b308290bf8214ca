"""From files to batches: sources are listed, probed and staged into an arena, then ordered, decoded and batched."""
