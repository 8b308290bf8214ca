"""Speed as ratios of one run: ours against a peer or a limit that was timed in the same minutes."""
