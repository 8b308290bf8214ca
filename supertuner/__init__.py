"""SuperTuner fine-tunes diffusion models on machines whose CPU and GPU share memory. Importing it does nothing."""

__version__ = "0.1.0"
