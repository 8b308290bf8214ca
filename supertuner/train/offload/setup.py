"""The plans of a run, from what was forecast and what its settings ask for; and the run's experts put under them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from supertuner.config.settings.tree import RunConfig
from supertuner.core.events import Sink
from supertuner.models import loading
from supertuner.models.blocks import blocks_of
from supertuner.models.spec import Expert, Model
from supertuner.plan.placement.overrides import wished
from supertuner.plan.placement.plan import Residence, Stepping
from supertuner.plan.placement.planner import Planned, Planning
from supertuner.plan.placement.replan import Basis, Observed
from supertuner.step.precision import Precision
from supertuner.step.window import Trainee
from supertuner.train.memory import MemoryEngine
from supertuner.train.offload.manager import Acts
from supertuner.train.offload.optimizer_state import HOST
from supertuner.train.offload.transfer import carrier_for
from supertuner.train.out_of_memory import fitting


def plans_of(
    config: RunConfig, model: Model, experts: Sequence[Expert], planning: Planning | None
) -> dict[str, Planned]:
    """Expert → the plan that it is run by. Experts without one are left as they are."""
    found = {}
    for expert in experts:
        blocks = list(blocks_of(loading.skeleton(model, expert.part)))
        made = None if planning is None else planning.planned(expert.name)
        own = _asked(config, made, expert.name, blocks)
        if own is not None:
            found[expert.name] = own
    return found


def waits_at_home(config: RunConfig, planned: Planned | None, device: torch.device) -> torch.device:
    """Where an expert is loaded to: what only visits the device is never on it as a whole. Averages of all weights are
    made beside them, and may be too much together."""
    if planned is None:
        return device
    streamed = any(row.weights is Residence.STREAMED for row in planned.plan.blocks)
    averaged = config.adapter.type == "full" and config.train.ema_decay is not None
    apart = averaged and planned.plan.stepping is not Stepping.GPU
    return HOST if streamed or planned.plan.idle_at_home or apart else device


def acts_of(
    config: RunConfig,
    trainees: Sequence[Trainee],
    planned: Mapping[str, Planned],
    planning: Planning | None,
    precision: Precision,
    memory: MemoryEngine,
    sink: Sink,
) -> Acts | None:
    """The experts under their plans; None: nothing is planned."""
    if not planned:
        return None
    with fitting("what the plan keeps on the device does", partial(memory.remedy, 'set plan.weights: "streamed"')):
        return Acts(
            trainees,
            planned,
            carrier_for(precision.device),
            sink,
            every=config.plan.check_every_windows,
            replan=None if planning is None else partial(_anew, config, planning, list(blocks_of(trainees[0].module))),
        )


def _anew(
    config: RunConfig,
    planning: Planning,
    blocks: Sequence[str],
    expert: str,
    basis: Basis,
    seen: Observed,
) -> Planned | None:
    made = planning.anew(expert, basis, seen)
    return None if made is None else _asked(config, made, expert, blocks)


def _asked(config: RunConfig, made: Planned | None, expert: str, blocks: Sequence[str]) -> Planned | None:
    """The plan with what the settings ask for."""
    plan = wished(
        config.plan,
        None if made is None else made.plan,
        blocks,
        phase=f"train {expert}",
        recomputing=config.train.gradient_checkpointing,
    )
    if plan is None:
        return None
    if made is None:
        return Planned(plan, Basis(), len(plan.blocks) if config.plan.ahead is None else plan.ahead)
    most = made.most_ahead if config.plan.ahead is None else plan.ahead
    return replace(made, plan=plan, most_ahead=most)
