"""The training steps on which plans are evaluated: traced at full size on fake tensors, and stored in plan_tables/.

`python benchmarks/workloads.py [name …]` traces them again (half a minute and half a gigabyte each). Do so when model
families, the trainer or the trace change, so that bench_plan.py evaluates the current step. Nothing is downloaded.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from supertuner.plan.placement.step_table import BlockCosts, OperatorWork, StepTable

TABLES = Path(__file__).resolve().parent / "plan_tables"


@dataclass(frozen=True)
class PlanWorkload:
    title: str
    family: str
    path: str
    media: tuple[int, ...]
    samples: int
    adapter: Mapping[str, Any]
    picture: tuple[int, ...] | None = None
    """Shape of the reference image of an editing model."""
    both_experts: bool = False
    """Whether another expert of the same size is idle meanwhile."""


_WAN = "Wan-AI/Wan2.2-T2V-A14B-Diffusers"
_FLUX = "black-forest-labs/FLUX.1-dev"
_FULL = {"type": "full"}
_LORA = {"rank": 32}
_FILM, _SQUARE = (3, 81, 720, 1280), (3, 1024, 1024)
WORKLOADS: Final[Mapping[str, PlanWorkload]] = {
    "wan-lora": PlanWorkload(
        "Wan2.2 14B LoRA, both experts, 81 frames of 1280×720", "wan2.2", _WAN, _FILM, 1, _LORA, both_experts=True
    ),
    "wan-full": PlanWorkload("Wan2.2 14B full, one expert, 81 frames of 1280×720", "wan2.2", _WAN, _FILM, 1, _FULL),
    "qwen-edit-lora": PlanWorkload(
        "Qwen-Image-Edit 20B LoRA, batch 8, 1024×1024", "qwen-image-edit", "Qwen/Qwen-Image-Edit", _SQUARE, 8, _LORA,
        picture=_SQUARE,
    ),
    "flux-full": PlanWorkload("Flux dev full, batch 1, 1024×1024", "flux", _FLUX, _SQUARE, 1, _FULL),
    "flux-full-8": PlanWorkload("Flux dev full, batch 8, 1024×1024", "flux", _FLUX, _SQUARE, 8, _FULL),
    "wan-lora-480": PlanWorkload(
        "Wan2.2 14B LoRA, both experts, 81 frames of 832×480", "wan2.2", _WAN, (3, 81, 480, 832), 1, _LORA,
        both_experts=True,
    ),
    "flux-lora": PlanWorkload("Flux dev LoRA, batch 1, 512×512", "flux", _FLUX, (3, 512, 512), 1, _LORA),
}  # fmt: skip
"""The four goals of planning (Flux at two batch sizes), one whose activations fit host memory, one that fits a GPU."""


def table(name: str) -> StepTable:
    """The stored table of a workload."""
    stored = json.loads((TABLES / f"{name}.json").read_text())
    fields = {key: value for key, value in stored.items() if key not in ("blocks", "update", "made")}
    return StepTable(blocks=tuple(_blocks(stored["blocks"])), update=OperatorWork(**stored["update"]), **fields)


def _blocks(rows: Sequence[Mapping[str, Any]]) -> list[BlockCosts]:
    found = []
    for row in rows:
        fields: dict[str, Any] = {key: value for key, value in row.items() if key != "names"}
        fields |= {key: OperatorWork(**row[key]) for key in ("forward", "backward")}
        found += [BlockCosts(name=name, **fields) for name in row["names"]]
    return found


def _to_json(made: StepTable, how: str) -> dict[str, Any]:
    """The table with equal neighbouring blocks joined into one row."""
    rows: list[dict[str, Any]] = []
    for block in made.blocks:
        fields = {key: value for key, value in asdict(block).items() if key != "name"}
        if rows and {key: value for key, value in rows[-1].items() if key != "names"} == fields:
            rows[-1]["names"].append(block.name)
        else:
            rows.append({"names": [block.name], **fields})
    return {"made": how, **asdict(replace(made, blocks=())), "blocks": rows}


def trace(name: str) -> StepTable:
    """Trace the current training step of a workload."""
    from supertuner.config.settings.run_config import RunConfig
    from supertuner.models.published_models import describe_model
    from supertuner.plan.trace.cuda_kernels import CudaDevice
    from supertuner.plan.trace.encoder_shapes import EncoderShapeProbe
    from supertuner.plan.trace.step_table_builder import build_step_table
    from supertuner.plan.trace.trace_training_step import trace_training_step
    from supertuner.step.expert_setup import selected_experts

    workload = WORKLOADS[name]
    config = RunConfig.model_validate(
        {
            "model": {"family": workload.family, "path": workload.path},
            "adapter": workload.adapter,
            "train": {"batch_size": workload.samples, "max_steps": 1},
        }
    )
    family, model, _ = describe_model(config.model)
    shape = EncoderShapeProbe(config, family, model).batch_shape(workload.samples, workload.media, workload.picture)
    expert = selected_experts(config, model)[0]
    found = build_step_table(trace_training_step(config, family, model, expert, shape, device=CudaDevice()))
    other = found.weight_bytes + sum(block.state_bytes for block in found.blocks)
    return replace(found, idle_bytes=other if workload.both_experts else 0)


def main(names: Sequence[str]) -> int:
    import datetime

    import torch

    TABLES.mkdir(exist_ok=True)
    for name in names or list(WORKLOADS):
        how = f"traced on {datetime.date.today()} with torch {torch.__version__}"
        text = json.dumps(_to_json(trace(name), how), indent=1)
        (TABLES / f"{name}.json").write_text(text + "\n")
        sys.stdout.write(f"{name}: {WORKLOADS[name].title}, {how}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
