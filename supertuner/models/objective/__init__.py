"""The training objective: sigmas, noisy inputs, targets, loss weights. Pure functions with their sources."""
