"""Loads files, --set and environment variables into one frozen RunConfig, and records the origin of every value."""
