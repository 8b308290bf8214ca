"""Checkpoints: collected from a run, written durably in the background, verified, loaded and resumed from."""
