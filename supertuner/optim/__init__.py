"""Optimizers, and schedules as pure functions of the position in the run."""
