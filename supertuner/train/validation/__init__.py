"""Validation during training: held-out loss, and samples as images and videos."""
