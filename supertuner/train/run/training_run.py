"""A run's state: what was built for it, and the little that changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from supertuner.config.settings.run_config import RunConfig
from supertuner.core.events import Progress, Sink
from supertuner.core.host import HostFacts
from supertuner.distributed.process_group import ProcessGroup
from supertuner.models.adapters.attach import TrainableExpert
from supertuner.models.spec import Expert, Family, ModelDescription
from supertuner.optim.schedule import TrainingSchedule, learning_rate_factor
from supertuner.plan.sample_requests import ValidationSamplePlan
from supertuner.step.window import ExpertState, StepOptions
from supertuner.train.run.dataloader import BatchCollator, TrainingDataLoader, batches_ahead
from supertuner.train.run.loss_log import LossLog
from supertuner.train.run.memory_engine import MemoryEngine
from supertuner.train.offload.manager import OffloadManager

HELD_OUT_FILE = "validation.jsonl"
SAMPLES_DIR = "samples"
EXPORTS_DIR = "exports"


@dataclass(slots=True)
class TrainingRun:
    """Everything a run is. Below the line is what changes, beside the weights and optimizers that trainees hold."""

    name: str
    config: RunConfig
    folder: Path
    sink: Sink
    progress: Progress
    host: HostFacts
    device: torch.device
    dtype: torch.dtype
    """What forward and backward compute in."""
    process_group: ProcessGroup
    initial_world_size: int
    """How many processes the run began with: its windows stay what they were, however many go on with it."""
    family: Family
    model: ModelDescription
    schedule: TrainingSchedule
    step_options: StepOptions
    collator: BatchCollator
    held_out_collator: BatchCollator | None
    """Makes batches of held-out data, if there is any."""
    expert_states: tuple[ExpertState, ...]
    """One per trained expert, in the order of the model's experts."""
    trainable_experts: Mapping[str, TrainableExpert]
    """Expert → what is trained of it, for saving and exporting."""
    loss_log: LossLog
    validation_log: LossLog
    """Held-out losses."""
    sample_plan: ValidationSamplePlan
    memory: MemoryEngine
    """Hints, batches in unified memory, overflow, telemetry."""
    offload: OffloadManager | None
    """Plans at work; None: everything stays on the device."""
    initial_weight_digests: Mapping[str, str]
    """Expert and setting of each file that an adapter begins with or is trained on top of → what it is known by."""
    # ------------------------------------------------------------------
    step: int = 0
    """Optimizer steps done."""
    nonfinite_windows: int = 0
    """Windows in a row whose loss or gradient was not a number."""

    @property
    def experts(self) -> tuple[Expert, ...]:
        return tuple(trainee.expert for trainee in self.expert_states)

    @property
    def samples_consumed(self) -> int:
        """Samples consumed: a function of the step."""
        return self.schedule.samples_after(self.step)

    def lr_factor(self, step: int) -> float:
        """What learning rates are multiplied by in a step."""
        optimizer = self.config.optimizer
        return learning_rate_factor(step, self.schedule.total_steps, optimizer.lr_scheduler, optimizer.lr_warmup_steps)

    def dataloader(self) -> TrainingDataLoader:
        """Windows from the current step on."""
        return TrainingDataLoader(
            self.collator,
            self.schedule,
            self.experts,
            switch_every=self.config.model.switch_boundary_every,
            batch_size=self.config.train.batch_size,
            batches_ahead=batches_ahead(self.config, self.device)[0],
            process_group=self.process_group,
            start_step=self.step,
        )
