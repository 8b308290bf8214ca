"""Decides where weights, activations and optimizer state are kept, from a step table and a machine. Pure."""
