"""Residency hints for tensors and batches: where memory should be, what each hint did, and whether hints are on."""
