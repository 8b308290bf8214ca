"""The settings of SimpleTuner and ai-toolkit: tables of their keys, and pure functions that convert their values."""
