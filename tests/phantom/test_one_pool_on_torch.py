"""A run on the phantom as a GB10: nothing is copied to "host memory", and torch gets only a share of the pool."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from supertuner.core.types import GIB
from supertuner.memory.machines import ONE_POOL_SHARE

ROOT = Path(__file__).parents[2]
AVAILABLE = 3 * GIB
QUICKSTART = """
import json, sys
from pathlib import Path
import torch
from supertuner.tools.quickstart import run_quickstart
from supertuner.train.offload.manager import OffloadManager

managers = []
made = OffloadManager.__init__
def remember(self, *args, **more):
    managers.append(self)
    made(self, *args, **more)
OffloadManager.__init__ = remember
folder = Path(sys.argv[1])
settings = [f"arena.home={folder / 'arenas'}", "train.device=cuda", "train.max_steps=4", "validation.seeds=[0]"]
result = run_quickstart(folder / "quickstart", settings + ["validation.inference_steps=2"] + sys.argv[2:])
events = [json.loads(line) for line in (result.training.run_dir / "events.jsonl").read_text().splitlines()]
print(json.dumps({
    "steps": result.training.steps,
    "swaps": sum(one.expert_swap.swap_count for one in managers),
    "streamed": sum(len(expert.ring.streamed) for one in managers for expert in one.offloaded_experts.values()),
    "fraction": torch.cuda.get_per_process_memory_fraction(),
    "events": events,
}))
"""
OUT_OF_POOL = """
import sys
from pathlib import Path
import torch
from supertuner.arena.run_context import RunContext
from supertuner.config.settings.run_config import RunConfig
from supertuner.core.events import NullSink
from supertuner.core.host import HostFacts
from supertuner.train.run.memory_engine import open_memory

sink = NullSink()
context = RunContext(run_dir=Path(sys.argv[1]), sink=sink, progress=sink, host=HostFacts(Path(sys.argv[1])))
with open_memory(RunConfig(), torch.device("cuda", 0), context):
    held = torch.empty(int(sys.argv[2]), dtype=torch.uint8, device="cuda")
    try:
        more = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        print("refused")
"""
CPU_OFFLOAD = """
import torch
from supertuner.config.settings.run_config import RunConfig
from supertuner.core.errors import TrainError
from supertuner.distributed.fsdp import require_fsdp_supported
try:
    require_fsdp_supported(RunConfig.model_validate({"parallel": {"cpu_offload": True}}), torch.device("cuda", 0))
except TrainError as error:
    print(error)
"""


def on_machine(profile: str, code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        env={**os.environ, "FAKECUDA_PROFILE": profile, "FAKECUDA_HBM": str(16 * GIB), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def quickstart(profile: str, folder: Path) -> dict[str, Any]:
    told = on_machine(profile, QUICKSTART, str(folder), "plan.idle_experts=host", "plan.weights=streamed")
    result: dict[str, Any] = json.loads(told.splitlines()[-1])
    return result


@pytest.mark.timeout(600)
def test_a_run_on_a_pool_copies_nothing_to_host_memory_and_says_why(tmp_path: Path) -> None:
    found = quickstart("gb10", tmp_path)
    assert (found["steps"], found["swaps"], found["streamed"]) == (4, 0, 0)
    said = json.dumps(found["events"])
    for name in ("idle_experts", "weights"):
        assert f"plan.{name}" in said and "has no effect" in said and "share one memory" in said
    assert "memory.device_limit" in said
    assert found["fraction"] == 1.0, "a run leaves torch as it found it"


@pytest.mark.phantom_long
@pytest.mark.timeout(600)
def test_the_same_run_on_two_memories_follows_the_settings(tmp_path: Path) -> None:
    found = quickstart("gh200", tmp_path)
    assert found["swaps"] > 0 and found["streamed"] > 0
    assert "memory.device_limit" not in json.dumps(found["events"])


def test_torch_is_refused_what_would_fill_the_pool(tmp_path: Path) -> None:
    """The phantom's GB10 has 16 GiB, of which 3 are available by the kernel: the driver would give more."""
    (tmp_path / "proc").mkdir()
    meminfo = f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {AVAILABLE // 1024} kB\n"
    (tmp_path / "proc/meminfo").write_text(meminfo)
    share = int(ONE_POOL_SHARE * AVAILABLE)
    assert on_machine("gb10", OUT_OF_POOL, str(tmp_path), str(share - GIB // 2)) == "refused"
    assert on_machine("gb10", OUT_OF_POOL, str(tmp_path), str(share - 3 * GIB // 2)) == ""
    assert on_machine("gh200", OUT_OF_POOL, str(tmp_path), str(share - GIB // 2)) == ""


def test_cpu_offload_is_refused_on_a_pool_with_the_reason() -> None:
    said = on_machine("gb10", CPU_OFFLOAD)
    assert "parallel.cpu_offload is true" in said and "share one memory on NVIDIA GB10" in said
    assert "set parallel.cpu_offload: false" in said
    assert on_machine("gh200", CPU_OFFLOAD) == ""
