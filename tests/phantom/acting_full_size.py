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
from supertuner.core.events import NullSink
from supertuner.models.adapters import attach as adapters
from supertuner.models.blocks import named_blocks
from supertuner.models.objective.diffusion import TrainingObjective
from supertuner.models.spec import Expert, Tensors
from supertuner.optim.optimizer_registry import build_optimizer
from supertuner.plan.placement.plan import ActivationPolicy, BlockPlan, MemoryPlan, OptimizerPlacement, WeightPlacement
from supertuner.plan.placement.replan import PlanAssumptions
from supertuner.plan.placement.run_plans import ExpertPlan
from supertuner.step.batch import StepBatch
from supertuner.step.precision import ComputePrecision
from supertuner.step.train_step import ExpertState, StepOptions, prepare_for_training, train_window
from supertuner.train.offload.manager import OffloadManager
from supertuner.train.offload.transfer import CudaStreamTransfer

GPU = torch.device("cuda", 0)
TARGETS = ("to_q", "to_k", "to_v", "to_out.0")


def expert(name: str, layers: int) -> ExpertState:
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
    prepare_for_training(module, False)
    parameters = dict(trained.parameters)
    optimizer = build_optimizer(OptimizerSettings.model_validate({"name": "adamw"}), parameters, name)
    return ExpertState(Expert(name, "transformer"), module, parameters, optimizer)


def denoise(module: nn.Module, noisy: torch.Tensor, levels: torch.Tensor, text: Tensors, _: Tensors) -> torch.Tensor:
    found: torch.Tensor = module(noisy, levels * 1000, text["embeds"], return_dict=False)[0]
    return found


def plan(module: nn.Module, ahead: int) -> MemoryPlan:
    """Weights of all blocks but the first two are streamed; activations are sent, recomputed and kept."""
    names = list(named_blocks(module))
    rows = []
    for number, name in enumerate(names):
        fate = (
            ActivationPolicy.SEND
            if number < len(names) // 4
            else ActivationPolicy.KEEP
            if number == len(names) - 1
            else ActivationPolicy.RECOMPUTE
        )
        rows.append(BlockPlan(name, WeightPlacement.GPU if number < 2 else WeightPlacement.STREAMED, fate, "a test"))
    return MemoryPlan("train", "gh200-96", True, tuple(rows), ahead, OptimizerPlacement.GPU, True, None)


class Marks:
    """Writes into the driver's record when a block begins to compute, and where its weights are."""

    def __init__(self, acts: OffloadManager) -> None:
        self._file = os.open(os.environ["FAKECUDA_LOG"], os.O_WRONLY | os.O_APPEND)
        for acting in acts.offloaded_experts.values():
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
        if number in ring.streamed and number in ring._contents:
            slot = ring._slots[ring._contents[number].slot]
            address, nbytes = slot.data_ptr(), ring.streamed[number].nbytes
        os.write(self._file, f"use {number} {during} {address:#x} {nbytes}\n".encode())


def main(layers: int, ahead: int, frames: int, height: int, width: int) -> None:
    trainees = [expert(name, layers) for name in ("high_noise", "low_noise")]
    planned = {one.expert.name: ExpertPlan(plan(one.module, ahead), PlanAssumptions(), ahead) for one in trainees}
    acts = OffloadManager(trainees, planned, CudaStreamTransfer(GPU), NullSink())
    Marks(acts)
    rules = StepOptions(denoise, TrainingObjective(), ComputePrecision("bf16", GPU), max_grad_norm=1.0)
    latents = torch.empty(1, 16, frames, height, width, device=GPU, dtype=torch.bfloat16)
    batch = StepBatch(
        latents=latents,
        noise=torch.empty(latents.shape, device=GPU),
        sigmas=torch.zeros(1, device=GPU),
        text={"embeds": torch.empty(1, 512, 4096, device=GPU, dtype=torch.bfloat16)},
        conditions={},
    )
    torch.cuda.reset_peak_memory_stats()
    for trainee in trainees:
        for _ in range(2):
            result = train_window(trainee, [batch], samples=1, learning_rate=1e-4, options=rules)
            assert result.finite, result
    homes = {
        acting.expert_state.expert.name: {
            number: [leaf.get().data_ptr() for leaf in block.stored] for number, block in acting.ring.streamed.items()
        }
        for acting in acts.offloaded_experts.values()
    }
    told = {"homes": homes, "peak": torch.cuda.max_memory_allocated(), "changes": acts.expert_swap.swap_count}
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    os._exit(0)  # at times the end of the process itself aborts on the phantom: a C++ thread that nobody joined


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
