"""Small checkpoints for tests: two experts with adapters, optimizer and average, as in a real run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import xxhash

from supertuner.arena.run_context import RunContext
from supertuner.core.events import Event, NullSink, Progress, Sink, WarningEvent
from supertuner.core.host import HostFacts
from supertuner.core.types import JSON
from supertuner.train.checkpoint import tensor_file
from supertuner.train.checkpoint.durable_save import save_checkpoint
from supertuner.train.checkpoint.manifest import json_bytes
from supertuner.train.checkpoint.write_files import CheckpointContents

LAYER = "blocks.0.attn1.to_q"


def save_parts(
    folder: Path,
    step: int,
    parts: dict[str, dict[str, torch.Tensor]],
    state: dict[str, JSON],
    *,
    host: HostFacts | None = None,
    sink: Sink | None = None,
    progress: Progress | None = None,
    **more: Any,
) -> Path:
    """`save_checkpoint` with a context that reports nothing, unless a sink or progress is given."""
    context = RunContext(folder, sink or NullSink(), progress or NullSink(), host or HostFacts())
    return save_checkpoint(folder, CheckpointContents(step, parts, state), context, **more)


def parts_at(step: int, seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    """The parts of a run's checkpoint; another random seed means another run."""
    drawn = torch.Generator().manual_seed(1000 * seed + step)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=drawn)

    parts: dict[str, dict[str, torch.Tensor]] = {}
    for expert in ("high_noise", "low_noise"):
        parts[f"adapter.{expert}"] = {f"{LAYER}.lora_A.weight": normal(4, 7), f"{LAYER}.lora_B.weight": normal(7, 4)}
        parts[f"optimizer.{expert}"] = {"0.exp_avg": normal(4, 7), "0.step": torch.tensor(float(step))}
        parts[f"ema.{expert}"] = {f"{LAYER}.lora_A.weight": normal(4, 7).bfloat16()}
    parts["random"] = {"cpu": torch.randint(0, 256, (16,), dtype=torch.uint8, generator=drawn)}
    return parts


def state_at(step: int) -> dict[str, JSON]:
    return {"step": step, "samples": 4 * step, "scale": 65536.0, "expert": "high_noise", "names": ["é", "b"]}


def bytes_of(checkpoint: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in checkpoint.iterdir()}


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones included, with its content."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"/" for p in sorted(folder.rglob("*"))}


def forge_shard(made: Path, file: str, tensors: dict[str, torch.Tensor], begins: dict[str, int]) -> None:
    """Replace a shard by another file, with a matching manifest."""
    layout = tensor_file.plan_tensor_file(tensors, tensor_file.row_offsets_metadata(begins, tensors))
    content = b"".join(layout.chunks())
    (made / file).write_bytes(content)
    body = json.loads((made / "manifest.json").read_text())
    del body["checksum"]
    body["files"][file] = {"bytes": len(content), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}
    whole = {**body, "checksum": xxhash.xxh3_128_hexdigest(json_bytes(body))}
    (made / "manifest.json").write_bytes(json_bytes(whole))


class RecordingSink:
    """A sink that records events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event, /) -> None:
        self.events.append(event)

    def text(self) -> str:
        return "\n".join(f"{e.what}: {e.message}" for e in self.events if isinstance(e, WarningEvent))
