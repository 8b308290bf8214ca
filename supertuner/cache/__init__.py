"""Caches encoded samples and captions in arenas, under keys that cover everything they depend on."""
