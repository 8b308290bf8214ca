"""Benchmarks: speed as ratios to a peer or to a limit that is timed in the same run."""
