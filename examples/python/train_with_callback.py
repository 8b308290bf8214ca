"""Trains, and stops early by a callback when the loss has not improved for a while.

python examples/python/train_with_callback.py run.yaml        # a configuration of yours
python examples/python/train_with_callback.py                 # a tiny model on drawn pictures
"""

from __future__ import annotations

import math
import sys
import tempfile
from pathlib import Path

from sample_pictures import tiny_settings

import supertuner as st


class EarlyStop(st.TrainingCallback):
    """Stops the run after `patience` steps without a lower loss."""

    def __init__(self, patience: int) -> None:
        self.patience, self.best, self.best_step = patience, math.inf, 0

    def on_step(self, step: st.StepRecord, control: st.TrainingControl) -> None:
        print(f"step {step.step} of {step.expert}: loss {step.loss:.4f}")
        if step.loss < self.best:
            self.best, self.best_step = step.loss, step.step
        elif step.step - self.best_step >= self.patience:
            control.stop()

    def on_checkpoint(self, checkpoint: st.SavedCheckpoint, control: st.TrainingControl) -> None:
        print(f"saved {checkpoint.path.name}")


with tempfile.TemporaryDirectory() as folder:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else tiny_settings(Path(folder))
    result = st.train(st.load_config(source), callbacks=[EarlyStop(patience=3)], show_progress=False)
    print(f"{result.steps} steps, stopped by {result.stopped_by}; {len(result.losses)} losses")
    print(f"adapters: {', '.join(path.name for path in result.adapters)}")
