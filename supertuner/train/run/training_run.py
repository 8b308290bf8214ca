"""The state of a run: what was built for it, and the few values that change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from supertuner.arena.run_context import RunContext
from supertuner.config.settings.run_config import RunConfig
from supertuner.distributed.process_group import ProcessGroup
from supertuner.models.adapters.attach import TrainableExpert
from supertuner.models.spec import Expert, Family, ModelDescription
from supertuner.optim.schedule import TrainingSchedule, learning_rate_factor
from supertuner.plan.sample_requests import ValidationSamplePlan
from supertuner.step.train_step import ExpertState, StepOptions
from supertuner.train.offload.manager import OffloadManager
from supertuner.train.run.dataloader import BatchCollator, LoaderOptions, TrainingDataLoader, batches_ahead
from supertuner.train.run.loss_log import LossLog
from supertuner.train.run.memory_engine import MemoryEngine

SAMPLES_DIR = "samples"
EXPORTS_DIR = "exports"


@dataclass(slots=True)
class TrainingRun:
    """Everything a run is. Below the line are the values that change, besides weights and optimizer states."""

    config: RunConfig
    context: RunContext
    device: torch.device
    dtype: torch.dtype
    """The dtype of forward and backward passes."""
    process_group: ProcessGroup
    initial_world_size: int
    """The number of ranks that the run began with. Its windows stay the same on any number of ranks."""
    family: Family
    model: ModelDescription
    schedule: TrainingSchedule
    step_options: StepOptions
    collator: BatchCollator
    held_out_collator: BatchCollator | None
    """Makes batches of held-out data; None: there is none."""
    expert_states: tuple[ExpertState, ...]
    """One per trained expert, in the order of the model's experts."""
    trainable_experts: Mapping[str, TrainableExpert]
    """Expert → its trained parameters, for saving and exporting."""
    loss_log: LossLog
    validation_log: LossLog
    """Held-out losses."""
    sample_plan: ValidationSamplePlan
    memory: MemoryEngine
    """Residency hints, batches in unified memory, overflow, telemetry."""
    offload: OffloadManager | None
    """Applies the offload plans; None: everything stays on the device."""
    initial_weight_digests: Mapping[str, str]
    """`expert: setting` of each adapter file that the run starts from or trains on top of → digest of its tensors."""
    # ------------------------------------------------------------------
    step: int = 0
    """Finished optimizer steps."""
    nonfinite_windows: int = 0
    """Consecutive windows, up to the last one, whose loss or gradient was not finite."""

    @property
    def name(self) -> str:
        return self.context.run_dir.name

    @property
    def experts(self) -> tuple[Expert, ...]:
        return tuple(expert_state.expert for expert_state in self.expert_states)

    @property
    def samples_consumed(self) -> int:
        """A function of the step."""
        return self.schedule.samples_after(self.step)

    def lr_factor(self, step: int) -> float:
        """The factor of all learning rates in a step: warm-up and schedule."""
        settings = self.config.optimizer
        return learning_rate_factor(
            step,
            self.schedule.total_steps,
            settings.lr_scheduler,
            settings.lr_warmup_steps,
            settings.lr_end_factor,
            settings.lr_power,
            settings.lr_cycles,
        )

    def dataloader(self) -> TrainingDataLoader:
        """Windows from the current step on."""
        config, ahead = self.config, batches_ahead(self.config, self.device)[0]
        options = LoaderOptions(config.train.batch_size, config.model.switch_boundary_every, ahead)
        return TrainingDataLoader(
            self.collator, self.schedule, self.experts, options, self.process_group, start_step=self.step
        )
