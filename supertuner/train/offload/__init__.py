"""Follows an offload plan: streams weights, sends activations to host memory, and moves optimizer state and experts."""
