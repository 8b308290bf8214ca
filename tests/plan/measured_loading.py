"""A program that loads an expert of Wan2.2 in bf16 and prints the peaks of its private memory as JSON. Measured.

usage: python -m tests.plan.measured_loading DEVICE FORMAT,... FOLDER ...      FORMAT: of the base weights
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from supertuner.core.events import NullSink
from supertuner.models.families.wan22.family import FAMILY as WAN
from supertuner.models.spec import ModelSource
from supertuner.step.expert_setup import place_base_weights

ROOT = Path(__file__).parents[2]
SMALL = "small"
"""Beside the folder: a pipeline that is loaded first, so that libraries and their tables are in memory."""


def write_pipelines(folder: Path, dtype: torch.dtype) -> Path:
    """A pipeline whose first expert has 67 million parameters, all zero, and a small one beside it."""
    from diffusers import WanTransformer3DModel

    wide = {"num_attention_heads": 8, "attention_head_dim": 128, "ffn_dim": 4096, "num_layers": 4}
    for path, changes in ((folder / "wide", wide), (folder / SMALL, {})):
        WAN.write_tiny_pipeline(path, 0)
        config = dict(WanTransformer3DModel.load_config(str(path), subfolder="transformer"))
        with torch.device("meta"):
            module = WanTransformer3DModel.from_config({**config, **changes}).to(dtype).requires_grad_(False)
        for parameter in module.to_empty(device="cpu").parameters():
            parameter.zero_()
        module.save_pretrained(str(path / "transformer"))
    return folder / "wide"


def measured_peaks(device: str, kinds: Sequence[str], *folders: Path) -> list[dict[str, int]]:
    """The peaks of a new process: for each folder, by format of the base weights."""
    # Freed memory returns to the system at once, so that it is not reused without being counted again.
    environment = {**os.environ, "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.plan.measured_loading",
        device,
        ",".join(kinds),
        *map(str, folders),
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    peaks: list[dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return peaks


def _private_bytes() -> int:
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def _peak_of_loading(folder: Path, device: str, kind: str) -> int:
    model = WAN.read_model(ModelSource(str(folder)))
    place = partial(place_base_weights, kind=kind, device=torch.device(device), sink=NullSink())
    gc.collect()
    before, samples, finished = _private_bytes(), [0], threading.Event()

    def watch() -> None:
        while not finished.is_set():
            samples.append(_private_bytes())
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    module = WAN.load_denoiser(model, model.experts[0], torch.bfloat16, place)
    finished.set()
    watcher.join()
    del module
    return max(samples) - before


def main(device: str, kinds: str, *folders: str) -> None:
    peaks: list[dict[str, int]] = []
    for folder in map(Path, folders):
        peaks.append({})
        for kind in kinds.split(","):
            _peak_of_loading(folder.with_name(SMALL), device, kind)
            peaks[-1][kind] = _peak_of_loading(folder, device, kind)
    sys.stdout.write(json.dumps(peaks) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
