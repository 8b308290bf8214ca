"""One training step as a function of its inputs."""
