"""Knows a step before it runs: its memory (trace), the best placement of its bytes (placement), a forecast of the
run."""
