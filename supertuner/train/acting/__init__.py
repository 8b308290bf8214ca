"""A plan carried out: weights, activations and optimizer state moved between two memories; no value is changed."""
