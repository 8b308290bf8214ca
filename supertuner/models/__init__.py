"""Families of diffusion models: each says what it is in one file, and nothing outside knows its name."""
