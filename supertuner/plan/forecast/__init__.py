"""Forecasts a configured run on a machine: memory of each phase, storage, time, plans, suggested changes."""
