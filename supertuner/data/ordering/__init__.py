"""Assigns samples to buckets and orders them: pure functions of seed, epoch and samples."""
