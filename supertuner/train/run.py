"""A run's state: what was built for it, and the little that changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from supertuner.config.settings.tree import RunConfig
from supertuner.core.events import Progress, Sink
from supertuner.core.host import Host
from supertuner.distributed.process_group import Parallel
from supertuner.models.adapters.attach import Trained
from supertuner.models.spec import Expert, Family, Model
from supertuner.optim.schedule import Course, rate_factor
from supertuner.plan.sample_requests import SamplePlan
from supertuner.step.window import Rules, Trainee
from supertuner.train.dataloader import Feed, Maker, batches_ahead
from supertuner.train.loss_log import LossLog
from supertuner.train.memory import MemoryEngine
from supertuner.train.offload.manager import Acts

HELD_OUT = "validation.jsonl"
SAMPLES = "samples"
EXPORTS = "exports"


@dataclass(slots=True)
class Run:
    """Everything a run is. Below the line is what changes, beside the weights and optimizers that trainees hold."""

    name: str
    config: RunConfig
    folder: Path
    sink: Sink
    progress: Progress
    host: Host
    device: torch.device
    dtype: torch.dtype
    """What forward and backward compute in."""
    parallel: Parallel
    begun_by: int
    """How many processes the run began with: its windows stay what they were, however many go on with it."""
    family: Family
    model: Model
    course: Course
    rules: Rules
    maker: Maker
    held_out: Maker | None
    """Makes batches of held-out data, if there is any."""
    trainees: tuple[Trainee, ...]
    """One per trained expert, in the order of the model's experts."""
    trained: Mapping[str, Trained]
    """Expert → what is trained of it, for saving and exporting."""
    losses: LossLog
    validations: LossLog
    """Held-out losses."""
    samples_plan: SamplePlan
    memory: MemoryEngine
    """Hints, batches in unified memory, overflow, telemetry."""
    acts: Acts | None
    """Plans at work; None: everything stays on the device."""
    given: Mapping[str, str]
    """Expert and setting of each file that an adapter begins with or is trained on top of → what it is known by."""
    # ------------------------------------------------------------------
    step: int = 0
    """Optimizer steps done."""
    nonfinite: int = 0
    """Windows in a row whose loss or gradient was not a number."""

    @property
    def experts(self) -> tuple[Expert, ...]:
        return tuple(trainee.expert for trainee in self.trainees)

    @property
    def samples(self) -> int:
        """Samples consumed: a function of the step."""
        return self.course.consumed(self.step)

    def factor(self, step: int) -> float:
        """What learning rates are multiplied by in a step."""
        optimizer = self.config.optimizer
        return rate_factor(step, self.course.total_steps, optimizer.lr_scheduler, optimizer.lr_warmup_steps)

    def feed(self) -> Feed:
        """Windows from the current step on."""
        return Feed(
            self.maker,
            self.course,
            self.experts,
            every=self.config.model.switch_boundary_every,
            batch_size=self.config.train.batch_size,
            ahead=batches_ahead(self.config, self.device)[0],
            parallel=self.parallel,
            begin=self.step,
        )
