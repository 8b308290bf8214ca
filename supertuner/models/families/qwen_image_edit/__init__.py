"""Qwen-Image-Edit."""
