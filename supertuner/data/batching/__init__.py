"""From staged bytes to batches: decoding, seeded changes, captions, and the batches ahead."""
