"""Training: everything is built and wired here, and run by one loop."""
