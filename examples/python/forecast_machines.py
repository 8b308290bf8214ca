"""Forecasts one run on three machines: whether it fits, its peak of GPU memory, and the time of a step.

    python examples/python/forecast_machines.py run.yaml        # a configuration of yours
    python examples/python/forecast_machines.py                 # a tiny model

Needs no GPU, no weights and no data. All figures are modelled.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from sample_pictures import tiny_settings

import supertuner as st

MACHINES = ("gh200-96", "h100-80-sxm", "rtx-4090")

with tempfile.TemporaryDirectory() as folder:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else tiny_settings(Path(folder))
    config = st.load_config(source)
    for machine in MACHINES:
        forecast = st.estimate(config, machine=machine, advise=False)
        step = "unknown" if forecast.step_seconds is None else f"{forecast.step_seconds:.3g} s"
        print(f"{machine:12} fits: {forecast.fits}  peak: {forecast.peak_bytes / 2**30:.2f} GiB  step: {step}")
        for phase in forecast.phases:
            print(f"    {phase.name:20} {phase.gpu_bytes / 2**30:8.3f} GiB")
