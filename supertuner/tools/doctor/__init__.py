"""`supertuner doctor`: what this machine is, what of it stands in a run's way, and whether its memory keeps its word.

`situation` gathers, `checks` judge (pure), `allocation` tries, `report` and `screen` tell.
"""
