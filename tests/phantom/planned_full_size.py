"""Runs full-size windows under their plans on the phantom, to check that a plan that fits by arithmetic really fits.

A step is traced, a plan for a GH200 is made from it, and the window runs under that plan on torch's own allocator. As a
program it prints one line per case: scripts/phantom_python.sh -m tests.phantom.planned_full_size [WORDS OF A TITLE]
Full fine-tunes are left out: an optimizer step on the host uses real memory, and a 14B model needs more than there is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from supertuner.core.events import NullSink
from supertuner.memory.machines import MACHINES
from supertuner.plan.placement.make_plan import make_plan
from supertuner.plan.placement.plan import MemoryPlan
from supertuner.plan.placement.throughput import MachineRates, MemoryLimits
from supertuner.plan.trace.cuda_kernels import CudaDevice
from supertuner.plan.trace.step_table_builder import build_step_table
from supertuner.plan.trace.trace_training_step import trace_training_step
from supertuner.step.expert_setup import build_expert_state, build_step_options, build_trainable_expert, weight_dtype
from supertuner.step.precision import ComputePrecision
from supertuner.step.train_step import train_window
from supertuner.train.offload.apply import apply_plan
from supertuner.train.offload.manager import plan_summary
from supertuner.train.offload.transfer import CudaStreamTransfer
from tests.phantom.full_size import GIB, KEEP, WAN, Case, _described, placed, zero_batches

CASES = (
    Case("Wan2.2 14B T2V, LoRA, 81 frames of 1280×720", "wan2.2", WAN, (3, 81, 720, 1280), train=KEEP),
    Case("Wan2.2 14B T2V, LoRA, 81 frames of 832×480", "wan2.2", WAN, (3, 81, 480, 832), train=KEEP),
)
MARGIN = 0.94
"""Share of the phantom's memory for the plan; the rest is for what the allocator reserves beyond the allocated
bytes."""


@dataclass(frozen=True)
class PlannedRun:
    plan: MemoryPlan
    peak: int
    reserved: int


def run(case: Case, machine: str = "gh200-96", compute_share: float = 0.4) -> PlannedRun:
    config, family, model, expert, shape = _described(case)
    trace = trace_training_step(config, family, model, expert, shape, device=CudaDevice())
    known = MACHINES[machine]
    total = torch.cuda.get_device_properties(0).total_memory
    limits = replace(MemoryLimits.from_machine(known), gpu_bytes=int(MARGIN * total))
    rates = MachineRates.from_machine(known, config.train.mixed_precision, compute_share=compute_share)
    plan = make_plan(build_step_table(trace, micro_batches=case.micro_batches), known, limits, rates=rates)
    assert plan.fits, plan.reasons
    device = torch.device("cuda", 0)
    precision = ComputePrecision(config.train.mixed_precision, device)
    module = family.load_denoiser(model, expert, weight_dtype(config, precision))
    # Built on the device, because host memory from torch is real memory; the phantom's device memory is not.
    trained = build_trainable_expert(config, family, expert, placed(device, module), precision, NullSink())
    expert_state = build_expert_state(config, expert, trained, precision)
    apply_plan(expert_state, plan, CudaStreamTransfer(device))
    options = build_step_options(config, family, model, precision, NullSink())
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        batches = zero_batches(shape, case.micro_batches, device)
        train_window(
            expert_state,
            batches,
            samples=case.samples * case.micro_batches,
            learning_rate=1e-4,
            options=options,
            seed=0,
        )
    return PlannedRun(plan, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


def main(words: Sequence[str]) -> None:
    for case in CASES:
        if all(word in case.title for word in words):
            result = run(case)
            modelled = result.plan.modelled
            planned = "?" if modelled is None else f"{modelled.gpu_peak_bytes / GIB:.2f}"
            measured = f"{result.peak / GIB:.2f} | {result.reserved / GIB:.2f}"
            sys.stdout.write(f"{case.title} | {planned} | {measured} | {plan_summary(result.plan)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
