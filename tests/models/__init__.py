"""Tests of `supertuner.models`."""
