"""A software superchip: a memory driver whose GPU is a model, for tests and forecasts."""
