"""Baselines: stored measurements of a configuration's training, and comparisons of later measurements with them."""
