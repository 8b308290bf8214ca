"""Caches encoded samples and captions in arenas, under keys that cover everything they depend on.

`store` fills and opens a cache, `entries` finds and reads its entries by key. Which entries the samples of a batch
need, `train/encoding/cache_lookup` knows.
"""
