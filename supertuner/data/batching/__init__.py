"""From staged bytes to batches: seeded augmentation and captions, decoding threads, and prefetch."""
