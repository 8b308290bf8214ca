"""The unified-memory engine."""
