"""For the fork server: everything that runs import when they come to it, and garbage nobody needs to look through.

It computes nothing, so that its children are whole. (`tests.train.runs` does the same for runs of one process.)
"""

from __future__ import annotations

import gc
import importlib

from supertuner.models.family_registry import FAMILY_MODULES, load_family
from tests.train.runs import LATE

RUNS = (
    "diffusers",
    "lycoris",
    "peft",
    "transformers",
    "supertuner.tools.loss_curve",
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
for name in FAMILY_MODULES:
    load_family(name)
gc.collect()
gc.freeze()
