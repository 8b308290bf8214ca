"""The settings, one class per block; their docstrings are their descriptions. Also their paths and value formats."""
