"""`supertuner train --try`: checks of the full-size run without its weights, and the same run on a tiny model."""
