"""Benchmarks with several ranks: starts a benchmark file as ranks, opens a run in each, and times two rivals in turns.

The rivals are SuperTuner's training loop and a plain loop with the same mathematics, in the same processes. The turns
are short and alternate within one training: on a shared machine, rounds of seconds would measure other processes.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.harness import ClaimRow, FigureSpread, RivalTiming, report
from benchmarks.runs import write_config
from supertuner.config.sources.launcher import LauncherEnvironment
from supertuner.core.events import Event, MeasurementEvent
from supertuner.sinks.training_events import TRAIN_STEP
from supertuner.train.run.training_run import TrainingRun

TURN, MICRO, BATCH = 8, 4, 4
"""Windows per turn, micro-batches per window and process, samples per micro-batch."""
TURNS, WARM_UP = 25, 2
STEPS = TURN * (TURNS + WARM_UP)
RIVALS = ("ours", "bare")


class ResidualLinearModel(nn.Module):
    """`count` layers of `width` × `width` weights, so that there are gradients to sum and shards to gather."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
            self.last = nn.Linear(width, 1)

    def forward(self, noisy: torch.Tensor) -> torch.Tensor:
        hidden = noisy.flatten(1)[:, : self.last.in_features]
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        predicted: torch.Tensor = noisy + self.last(hidden).mean()
        return predicted


def main_of(rows: Callable[[], list[ClaimRow]], run_rank: Callable[..., None]) -> int:
    """The command of a benchmark file: the whole benchmark, or with `--rank` one of its processes."""
    if sys.argv[1:2] == ["--rank"]:
        *of, answer = sys.argv[2:]
        run_rank(*of, Path(answer))
        return 0
    return report(rows())


def timed(file: str, ranks: int, *arguments: str) -> dict[str, RivalTiming]:
    """The times of the rivals' turns, measured by rank 0; each process runs `file --rank ARGUMENTS ANSWER`."""
    with tempfile.TemporaryDirectory() as answers:
        answer = Path(answers) / "times.json"
        with _processes(file, ranks, [*arguments, str(answer)]) as processes:
            codes = [process.wait() for process in processes]
        assert not any(codes), f"exit codes {codes}"
        return {name: RivalTiming(tuple(rounds)) for name, rounds in json.loads(answer.read_text()).items()}


def beyond(times: dict[str, RivalTiming]) -> FigureSpread:
    """Milliseconds per micro-batch that SuperTuner takes longer than the plain loop."""
    pairs = zip(*(times[rival].rounds_s for rival in RIVALS), strict=True)
    each = sorted((ours - bare) / (TURN * MICRO) * 1e3 for ours, bare in pairs)
    return FigureSpread(each[len(each) // 2], each[0], each[-1])


def place_here() -> LauncherEnvironment:
    """Rank and world size of this process."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return LauncherEnvironment(rank, ranks, rank, ranks)


class _AlternatingSink:
    """A sink of the run that lets the plain loop run for `TURN` steps after every `TURN` steps of training."""

    def __init__(self, run: TrainingRun, bare: Callable[[], None]) -> None:
        self._sink, self._parallel, self._bare = run.context.sink, run.process_group, bare
        self.times: dict[str, list[float]] = {rival: [] for rival in RIVALS}
        self._steps = 0
        self._begun = time.perf_counter()

    def emit(self, event: Event, /) -> None:
        self._sink.emit(event)
        if not isinstance(event, MeasurementEvent) or event.what != TRAIN_STEP:
            return
        self._steps += 1
        if self._steps % TURN == 0:
            self.times["ours"].append(time.perf_counter() - self._begun)
            self._begin()
            for _ in range(TURN):
                self._bare()
            self.times["bare"].append(time.perf_counter() - self._begun)
            self._begin()

    def _begin(self) -> None:
        """Start the next turn in all processes at once, after a garbage collection."""
        gc.collect(0)
        self._parallel.all_reduce_max([0])
        self._begun = time.perf_counter()


def measure(run: TrainingRun, bare: Callable[[int], None], micro: int, answer: Path) -> None:
    """In each rank: run both rivals in turns. `bare` receives the number of micro-batches per window."""
    from supertuner.train.loop import train

    turns = _AlternatingSink(run, lambda: bare(micro))
    run.context = replace(run.context, sink=turns)
    gc.disable()
    train(run)
    gc.enable()
    if run.process_group.rank == 0:
        answer.write_text(json.dumps({rival: seconds[WARM_UP:] for rival, seconds in turns.times.items()}))


def samples(run: TrainingRun) -> Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """A function that returns (clean, noise, sigma) of a micro-batch from tensors in memory."""
    from supertuner.data.ordering.micro_batches import micro_batches

    order = run.collator.corpus.order
    micros = micro_batches(order, range(order.epoch_length(0)), 1)
    latents = torch.cat([run.collator.encoded.latents(micro)["latents"] for micro in micros])
    texts = [run.collator.encoded.texts(micro)[0] for micro in micros]

    def draw() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        picked = torch.randint(len(latents), (BATCH,))
        clean = latents[picked].float()
        run.family.pad_text(run.model, [texts[row] for row in picked.tolist()])
        return clean, torch.randn(clean.shape), torch.sigmoid(torch.randn(BATCH)).view(-1, 1, 1, 1, 1)

    return draw


@contextmanager
def opened_run(
    name: str, folder: Path, place: LauncherEnvironment, micro: int, **settings: Any
) -> Iterator[TrainingRun]:
    """The run of one of several processes, with the default reports."""
    from supertuner.api.session import open_session
    from supertuner.api.training import open_report_sinks
    from supertuner.arena.run_context import RunContext
    from supertuner.config.sources.load import load_config
    from supertuner.distributed.torch_process_group import open_process_group
    from supertuner.distributed.watchdog.heartbeat import Heartbeat, HeartbeatProgress, HeartbeatSink
    from supertuner.train.setup import open_run

    torch.set_num_threads(1)
    config = folder / f"{name}.json"
    if place.is_main_process:
        windows = {"batch_size": BATCH, "gradient_accumulation_steps": micro, "max_steps": STEPS}
        # fp32, as in the plain loop
        written = write_config(folder, train={**windows, "mixed_precision": "fp32"}, run={"name": name}, **settings)
        written.rename(config)
    while not config.exists():  # rank 0 writes it
        time.sleep(0.01)
    loaded, pulse = load_config(config), Heartbeat()
    with ExitStack() as opened:

        def enter(context: AbstractContextManager[Any]) -> Any:
            return opened.enter_context(context)

        parallel = enter(open_process_group(loaded.config.parallel, place, torch.device("cpu"), pulse))
        work = enter(open_session(loaded, place))
        sink = HeartbeatSink(open_report_sinks(work, opened), pulse)
        context = RunContext(work.run_dir, sink, HeartbeatProgress(work.console, pulse), work.host)
        yield enter(open_run(work.config, context, process_group=parallel))


@contextmanager
def _processes(file: str, ranks: int, arguments: list[str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the file as a launcher would; on exit all processes are killed."""
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(hours=1))
    begun: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            environ = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
            command = [sys.executable, "-W", "ignore", file, "--rank", *arguments]
            quiet = None if rank == 0 else subprocess.DEVNULL
            begun.append(subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=quiet))
        yield begun
    finally:
        for process in begun:
            process.kill()
            process.wait()
