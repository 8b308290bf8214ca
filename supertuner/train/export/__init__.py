"""Adapter files: exported from a run, read to start a run, and converted between key schemes."""
