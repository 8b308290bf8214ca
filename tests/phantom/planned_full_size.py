"""Runs windows under their plans on the phantom, to check that a plan that fits by the model really fits.

A step is traced, a plan is made from it for a number of bytes, and the window runs under that plan on torch's own
allocator. As a program it prints one line per case:

    scripts/phantom_python.sh -m tests.phantom.planned_full_size [WORDS OF A TITLE]
    scripts/phantom_python.sh -m tests.phantom.planned_full_size --json TITLE BYTES MACHINE       the counters, as JSON

A full fine-tune at full size is left out: an optimizer step on the host uses real memory, and a 14B model needs more
than there is.
"""

from __future__ import annotations

import json
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
from supertuner.plan.trace.planned_allocation import TracedStep
from supertuner.plan.trace.step_table_builder import build_step_table
from supertuner.plan.trace.trace_training_step import trace_training_step
from supertuner.step.expert_setup import build_expert_state, build_step_options, build_trainable_expert, weight_dtype
from supertuner.step.precision import ComputePrecision
from supertuner.step.train_step import train_window
from supertuner.train.offload.apply import apply_plan
from supertuner.train.offload.manager import plan_summary
from supertuner.train.offload.transfer import CudaStreamTransfer
from tests.phantom.full_size import (
    FLUX,
    GIB,
    KEEP,
    QWEN,
    SD35,
    SD35_MEDIUM,
    WAN,
    Case,
    _described,
    chip,
    placed,
    zero_batches,
)

FULL_SIZE_CASES = (
    Case("Wan2.2 14B T2V, LoRA, 81 frames of 1280×720", "wan2.2", WAN, (3, 81, 720, 1280), train=KEEP),
    Case("Wan2.2 14B T2V, LoRA, 81 frames of 832×480", "wan2.2", WAN, (3, 81, 480, 832), train=KEEP),
)
FEW_LAYERS = {"num_layers": 6}
THREE_LAYERS = {"num_layers": 3}
FLUX_LAYERS = {"num_layers": 3, "num_single_layers": 6}
ALL_WEIGHTS = {"type": "full"}
RANK_64 = {"type": "lora", "rank": 64}
CASES = (
    *FULL_SIZE_CASES,
    Case("Wan, 6 layers", "wan2.2", WAN, (3, 49, 480, 832), train=KEEP, adapter=RANK_64, denoiser=FEW_LAYERS),
    Case("Wan stills, 6 layers", "wan2.2", WAN, (3, 896, 1152), 5, 2, train=KEEP, denoiser=FEW_LAYERS),
    Case("Qwen-Image, 6 layers", "qwen-image", QWEN, (3, 1328, 1328), 3, train=KEEP, denoiser=FEW_LAYERS),
    Case("Flux, 9 layers", "flux", FLUX, (3, 768, 1344), 3, 2, train=KEEP, denoiser=FLUX_LAYERS),
    Case("SD3.5, 6 layers", "sd3.5", SD35, (3, 1024, 1024), 5, train=KEEP, denoiser=FEW_LAYERS),
    Case(
        "SD3.5, all weights",
        "sd3.5",
        SD35_MEDIUM,
        (3, 512, 512),
        2,
        adapter=ALL_WEIGHTS,
        train=KEEP,
        denoiser=THREE_LAYERS,
    ),
)
MARGIN = 0.95
"""Share of the phantom's memory for the plan, as in a run."""


@dataclass(frozen=True)
class PlannedRun:
    plan: MemoryPlan
    peak: int
    reserved: int
    retries: int
    """How often torch released cached memory because the GPU was full."""


def run(case: Case, budget_bytes: int, machine: str = "gh200-96", *, counts_reserved: bool = True) -> PlannedRun:
    config, family, model, expert, shape = _described(case)
    trace = trace_training_step(config, family, model, expert, shape, device=CudaDevice(chip=chip()))
    known = MACHINES[machine]
    limits = replace(MemoryLimits.from_machine(known, host_bytes=512 * GIB), gpu_bytes=budget_bytes)
    rates = MachineRates.from_machine(known, config.train.mixed_precision, compute_share=0.4)
    table = build_step_table(trace, micro_batches=case.micro_batches)
    reserved_model = TracedStep(trace, table).reserved_bytes if counts_reserved else None
    plan = make_plan(table, known, limits, rates=rates, reserved_bytes=reserved_model)
    assert plan.fits, plan.reasons
    device = torch.device("cuda", 0)
    precision = ComputePrecision(config.train.mixed_precision, device)
    module = family.load_denoiser(model, expert, weight_dtype(config, precision))
    # Built on the device, because host memory from torch is real memory; the phantom's device memory is not.
    trained = build_trainable_expert(config, family, expert, placed(device, module), precision, NullSink())
    expert_state = build_expert_state(config, expert, trained, precision)
    apply_plan(expert_state, plan, CudaStreamTransfer(device))
    torch.cuda.empty_cache()  # a run loads streamed weights to the host; here they were on the device first
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
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    return PlannedRun(plan, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), retries)


def main(words: Sequence[str]) -> None:
    if words[:1] == ["--json"]:
        case = next(case for case in CASES if case.title == words[1])
        result = run(case, int(words[2]), words[3], counts_reserved="--live-bytes" not in words)
        modelled = result.plan.modelled
        figures = {
            "planned_reserved": None if modelled is None else modelled.gpu_reserved_bytes,
            "planned_live": None if modelled is None else modelled.gpu_peak_bytes,
            "live": result.peak,
            "reserved": result.reserved,
            "retries": result.retries,
            "plan": plan_summary(result.plan),
        }
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    total = torch.cuda.get_device_properties(0).total_memory
    for case in FULL_SIZE_CASES:
        if all(word in case.title for word in words):
            result = run(case, int(MARGIN * total))
            modelled = result.plan.modelled
            planned = (
                "?" if modelled is None else f"{modelled.gpu_peak_bytes / GIB:.2f} | {modelled.gpu_bytes / GIB:.2f}"
            )
            measured = f"{result.peak / GIB:.2f} | {result.reserved / GIB:.2f}"
            sys.stdout.write(f"{case.title} | {planned} | {measured} | {plan_summary(result.plan)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
