"""Tests of `supertuner.optim`."""
