"""Optimizers, and the pure functions of position that steer them."""
