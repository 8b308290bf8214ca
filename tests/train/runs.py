"""Small real training runs for tests, in processes forked from one that has imported everything.

Importing takes seconds, a fork milliseconds. The parent computes nothing itself and has one thread, so forking it is
safe.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

ROOT = Path(__file__).resolve().parents[2]
LATE = (
    "PIL.PngImagePlugin",
    "diffusers.guiders",
    "diffusers.pipelines.flux.pipeline_flux",
    "diffusers.pipelines.qwenimage.pipeline_qwenimage_edit",
    "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3",
    "diffusers.pipelines.stable_diffusion_xl.pipeline_stable_diffusion_xl",
    "diffusers.pipelines.wan.pipeline_wan",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "supertuner.config.sources.load",
    "supertuner.sinks.training_display",
    "supertuner.sinks.run_folder",
    "supertuner.api.training",
    "tensorboard.summary.writer.event_file_writer",
)
"""What runs import only when they come to it; imported once here, it is there in all of them."""
COLOURS = ("red", "green", "blue", "white", "orange", "purple", "yellow", "cyan")


def pictures(folder: Path, count: int, first: int = 0) -> Path:
    """Captioned images of 32×32 with a coloured square each."""
    folder.mkdir(parents=True)
    for number in range(first, first + count):
        image = Image.new("RGB", (32, 32), (number * 7 % 256, 40, 60))
        corner = 4 + number % 8
        colour = COLOURS[number % len(COLOURS)]
        ImageDraw.Draw(image).rectangle((corner, corner, corner + 14, corner + 14), fill=colour)
        image.save(folder / f"{number:03d}.png")
        (folder / f"{number:03d}.txt").write_text(f"a {colour} square")
    return folder


def config(folder: Path, name: str, **changed: Any) -> Path:
    """The configuration of a run with two experts, a ramp and all features; `changed` replaces or extends blocks.

    The run's folder is `folder / name / "run"`, so that files with the run's name can be compared.
    """
    data = folder / "data"
    if not data.exists():
        pictures(data / "train", 6)
        pictures(data / "held_out", 2, first=6)
    common = {"resolution": 32, "bucket_step": 16}
    tree: dict[str, Any] = {
        "run": {"name": "run", "output_dir": str(folder / name), "seed": 7},
        "model": {"family": "wan2.2", "path": "tiny", "switch_boundary_every": 2},
        "adapter": {"rank": 2, "dropout": 0.1},
        "arena": {"home": str(folder / "arenas"), "disk_home": str(folder / "disk-arenas")},
        "datasets": [
            {"id": "squares", "instance_data_dir": str(data / "train"), **common},
            {"id": "others", "instance_data_dir": str(data / "held_out"), "held_out": True, **common},
        ],
        "cache_config": {"persistent_cache": True, "cache_dir": str(folder / f"cache-{name}")},
        "train": {"batch_size": 2, "max_steps": 12, "mixed_precision": "fp32", "ema_decay": 0.9, "max_grad_norm": 1.0},
        "gh200_optimizations": {
            "enable_batch_size_rampup": True,
            "initial_effective_batch_size": 1,
            "target_effective_batch_size": 4,
            "batch_rampup_steps": 8,
        },
        "optimizer": {"learning_rate": 0.001, "lr_scheduler": "cosine", "lr_warmup_steps": 2},
        "checkpoints": {"every_steps": 2, "keep": 2},
        "validation": {"at_start": True, "every_steps": 6, "inference_steps": 2, "prompts": ["a red square"]},
    }
    for block, values in changed.items():
        tree[block] = {**tree.get(block, {}), **values} if isinstance(values, dict) else values
    file = folder / f"{name}.json"
    file.write_text(json.dumps(tree, indent=1))
    return file


class TrainingForkServer:
    """A process that has imported everything; each `start` forks a training run from it."""

    def __init__(self, log: Path, module: str = "tests.train.runs") -> None:
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-W", "ignore", "-m", module]
        self._log = log.open("ab")
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log
        )
        assert self._line() == "ready"

    def start(self, config: Path, *arguments: str) -> int:
        """Start `supertuner train CONFIG arguments…`; returns its process id."""
        return self.begin("train", str(config), *arguments)

    def begin(self, *arguments: str, cwd: Path = ROOT) -> int:
        """Start any `supertuner arguments…` in a folder; returns its process id."""
        return int(self._ask(json.dumps(["run", str(cwd), *arguments])))

    def wait(self, pid: int) -> int:
        """The exit code of a run; negative if a signal ended it."""
        return int(self._ask(json.dumps(["wait", str(pid)])))

    def train(self, config: Path, *arguments: str) -> int:
        return self.wait(self.start(config, *arguments))

    def printed(self, *arguments: str, cwd: Path = ROOT) -> str:
        """What `supertuner arguments…` printed; it must succeed."""
        code, text = self.code_and_output(*arguments, cwd=cwd)
        assert code == 0, self.output()
        return text

    def code_and_output(self, *arguments: str, cwd: Path = ROOT) -> tuple[int, str]:
        """The exit code of `supertuner arguments…`, and what it printed."""
        start = Path(self._log.name).stat().st_size
        code = self.wait(self.begin(*arguments, cwd=cwd))
        return code, Path(self._log.name).read_bytes()[start:].decode()

    def train_together(self, *configs: Path) -> list[int]:
        """Run several configurations at the same time; returns their exit codes."""
        return [self.wait(pid) for pid in [self.start(config) for config in configs]]

    def kill_after(self, config: Path, seconds: float) -> int:
        """Start a run and kill it after some seconds; returns its exit code, 0 if it had ended before."""
        pid = self.start(config)
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)  # not reaped before `wait`, so the process id is not reused
        return self.wait(pid)

    def output(self) -> str:
        """The end of the output of the runs."""
        return Path(self._log.name).read_text(errors="replace")[-3000:]

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()
        return self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().decode().strip()


def exported_file(run: Path, expert: str) -> Path:
    """The file of an expert in the newest export of a run, in our own names."""
    return next(max((run / "exports").glob("step-*")).glob(f"*_{expert}.safetensors"))


def artefacts(run: Path) -> dict[str, bytes]:
    """Name → content of every file of a run that must not depend on how often it was killed."""
    kept = ["losses.jsonl", "validation.jsonl"]
    found = [run / name for name in kept]
    for folder in ("exports", "samples", "checkpoints"):
        found += [path for path in (run / folder).rglob("*") if path.is_file()]
    return {path.relative_to(run).as_posix(): path.read_bytes() for path in found}


def serve() -> None:
    """The server: reads commands, forks, waits."""
    import diffusers  # noqa: F401
    import lycoris  # noqa: F401
    import peft  # noqa: F401
    import torch
    import transformers  # noqa: F401

    import supertuner.runs.loss_curve
    import supertuner.train.export.export
    import supertuner.train.loop
    import supertuner.train.setup  # noqa: F401
    from supertuner.config.families import FAMILIES
    from supertuner.models.family_loader import load_family

    for name in FAMILIES:
        load_family(name)
    for module in LATE:
        importlib.import_module(module)
    torch.set_num_threads(1)
    # A run collects garbage whenever it drops a model. Without the freeze, half of a run's time would go into scanning
    # the imported objects, and into copying the pages that the scan writes to.
    gc.collect()
    gc.freeze()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    answers.write("ready\n")
    for line in sys.stdin:
        verb, first, *rest = json.loads(line)
        if verb == "run":
            answers.write(f"{_fork(first, rest)}\n")
        else:
            answers.write(f"{os.waitstatus_to_exitcode(os.waitpid(int(first), 0)[1])}\n")


def _fork(folder: str, arguments: list[str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.close(0)
    code = 70
    try:
        from supertuner.cli import main

        os.chdir(folder)
        sys.argv = ["supertuner", *arguments]
        main()
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 0 if ending.code is None else 1
    except Exception:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
