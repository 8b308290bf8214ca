"""Adapters: attaching, training state, file formats of many programs, merging."""
