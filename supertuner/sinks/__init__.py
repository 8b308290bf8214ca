"""Sinks of events: run folder, JSON lines, console, TensorBoard, Weights & Biases. They receive plain data."""
