"""Stages a source into a sealed arena: checks that it fits, copies files in threads, and sets broken files aside."""
