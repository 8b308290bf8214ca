"""Traces the phases of a run at full size on fake tensors: every tensor's bytes and lifetime, and the operators'
work."""
