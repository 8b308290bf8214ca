"""`supertuner doctor`: describes this machine, finds obstacles to training, and tests memory beyond the GPU's own.

`system_snapshot` collects facts, `*_checks` judge them (pure), `allocation` tests memory, `doctor_report` and `screen`
present the results.
"""
