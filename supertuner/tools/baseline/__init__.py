"""Baselines: what a configuration's training takes today, kept, and judged against what it takes later or elsewhere."""
