"""Families of models: one folder per family, and what they share in `*_common.py`."""
