"""For the fork server: imports everything that runs import lazily, and excludes it from garbage collection.

It computes nothing, since forking a process with torch's threads is unsafe. (`tests.train.runs` does the same for runs
of one process.)
"""

from __future__ import annotations

import gc
import importlib

from supertuner.config.families import FAMILIES
from supertuner.models.family_loader import load_family
from tests.train.runs import LATE

RUNS = (
    "diffusers",
    "lycoris",
    "peft",
    "transformers",
    "supertuner.runs.loss_curve",
    "supertuner.plan.forecast.preflight",
    "supertuner.train.export.export",
    "supertuner.train.loop",
    "supertuner.distributed.torch_process_group",
    "supertuner.train.setup",
    "tests.distributed.runs",
    "tests.distributed.training",
)

for name in (*RUNS, *LATE):
    importlib.import_module(name)
for name in FAMILIES:
    load_family(name)
gc.collect()
gc.freeze()
