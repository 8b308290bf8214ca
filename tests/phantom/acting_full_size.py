"""A program for the phantom: Wan2.2 14B with both experts at full size under a plan, one window each, on record.

usage: FAKECUDA_LOG=FILE scripts/phantom_python.sh -m tests.phantom.acting_full_size LAYERS AHEAD FRAMES HEIGHT WIDTH
prints JSON: what a checker of the record must know, and what the caching allocator says.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from typing import Any

import torch
from torch import nn

from supertuner.config.settings.model import AdapterSettings
from supertuner.config.settings.optim import OptimizerSettings
from supertuner.core.events import Silence
from supertuner.models.adapters import attach as adapters
from supertuner.models.blocks import blocks_of
from supertuner.models.objective.diffusion import Objective
from supertuner.models.spec import Expert, Tensors
from supertuner.optim.table import build
from supertuner.plan.placement.plan import BlockPlan, Fate, Plan, Residence, Stepping
from supertuner.plan.placement.planner import Planned
from supertuner.plan.placement.replan import Basis
from supertuner.step.batch import StepBatch
from supertuner.step.precision import Precision
from supertuner.step.window import Rules, Trainee, prepare, train_window
from supertuner.train.offload.manager import Acts
from supertuner.train.offload.transfer import SideStreams

GPU = torch.device("cuda", 0)
TARGETS = ("to_q", "to_k", "to_v", "to_out.0")


def expert(name: str, layers: int) -> Trainee:
    """A LoRA on an expert whose weights are zeros of no real memory."""
    from diffusers import WanTransformer3DModel

    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            module = WanTransformer3DModel(num_layers=layers)
    finally:
        torch.set_default_dtype(torch.float32)
    for own, parameter in module.named_parameters():  # as loading has it
        if any(part in own for part in WanTransformer3DModel._keep_in_fp32_modules):
            parameter.data = parameter.data.float()
    module = module.to_empty(device=GPU).requires_grad_(False)
    trained = adapters.attach(module, AdapterSettings(rank=16), TARGETS, seed=1, name=name)
    prepare(module, False)
    parameters = dict(trained.parameters)
    optimizer = build(OptimizerSettings.model_validate({"name": "adamw"}), parameters, name)
    return Trainee(Expert(name, "transformer"), module, parameters, optimizer)


def denoise(module: nn.Module, noisy: torch.Tensor, levels: torch.Tensor, text: Tensors, _: Tensors) -> torch.Tensor:
    found: torch.Tensor = module(noisy, levels * 1000, text["embeds"], return_dict=False)[0]
    return found


def plan(module: nn.Module, ahead: int) -> Plan:
    """Weights of all blocks but the first two are streamed; activations are sent, recomputed and kept."""
    names = list(blocks_of(module))
    rows = []
    for number, name in enumerate(names):
        fate = Fate.SEND if number < len(names) // 4 else Fate.KEEP if number == len(names) - 1 else Fate.RECOMPUTE
        rows.append(BlockPlan(name, Residence.GPU if number < 2 else Residence.STREAMED, fate, "a test"))
    return Plan("train", "gh200-96", True, tuple(rows), ahead, Stepping.GPU, True, None)


class Marks:
    """Writes into the driver's record when a block begins to compute, and where its weights are."""

    def __init__(self, acts: Acts) -> None:
        self._file = os.open(os.environ["FAKECUDA_LOG"], os.O_WRONLY | os.O_APPEND)
        for acting in acts.actings.values():
            assert acting.blocks is not None
            for number, module in enumerate(acting.blocks.modules):
                module.register_forward_pre_hook(partial(self._begins, acting.ring, number))
                module.register_forward_hook(partial(self._made, acting.ring, number))

    def _begins(self, ring: Any, number: int, *_: Any) -> None:
        self._mark(ring, number, "backward" if torch._C._current_graph_task_id() != -1 else "forward")

    def _made(self, ring: Any, number: int, _module: Any, _inputs: Any, made: torch.Tensor) -> None:
        if made.requires_grad and torch._C._current_graph_task_id() == -1:
            made.register_hook(lambda _: self._mark(ring, number, "backward"))

    def _mark(self, ring: Any, number: int, during: str) -> None:
        address = nbytes = 0
        if number in ring.streamed and number in ring._held:
            slot = ring._slots[ring._held[number].slot]
            address, nbytes = slot.data_ptr(), ring.streamed[number].nbytes
        os.write(self._file, f"use {number} {during} {address:#x} {nbytes}\n".encode())


def main(layers: int, ahead: int, frames: int, height: int, width: int) -> None:
    trainees = [expert(name, layers) for name in ("high_noise", "low_noise")]
    planned = {one.expert.name: Planned(plan(one.module, ahead), Basis(), ahead) for one in trainees}
    acts = Acts(trainees, planned, SideStreams(GPU), Silence())
    Marks(acts)
    rules = Rules(denoise, Objective(), Precision("bf16", GPU), max_grad_norm=1.0)
    latents = torch.empty(1, 16, frames, height, width, device=GPU, dtype=torch.bfloat16)
    batch = StepBatch(
        latents=latents,
        noise=torch.empty(latents.shape, device=GPU),
        levels=torch.zeros(1, device=GPU),
        text={"embeds": torch.empty(1, 512, 4096, device=GPU, dtype=torch.bfloat16)},
        conditions={},
    )
    torch.cuda.reset_peak_memory_stats()
    for trainee in trainees:
        for _ in range(2):
            result = train_window(trainee, [batch], samples=1, rate=1e-4, rules=rules)
            assert result.finite, result
    homes = {
        acting.trainee.expert.name: {
            number: [leaf.get().data_ptr() for leaf in block.leaves] for number, block in acting.ring.streamed.items()
        }
        for acting in acts.actings.values()
    }
    told = {"homes": homes, "peak": torch.cuda.max_memory_allocated(), "changes": acts.turns.changes}
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    os._exit(0)  # at times the end of the process itself aborts on the phantom: a C++ thread that nobody joined


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
