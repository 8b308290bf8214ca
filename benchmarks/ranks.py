"""Benchmarks of several processes: a benchmark's file started as ranks, a run opened in each of them, and two rivals
that take turns in the same processes: our engine, and the same mathematics as a person would write it down.

The turns are short, and lie within one training: on a shared machine, rounds of seconds measure its neighbours.
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
"""Windows of a turn, micro-batches of a window and process, samples of a micro-batch."""
TURNS, WARM_UP = 25, 2
STEPS = TURN * (TURNS + WARM_UP)
RIVALS = ("ours", "bare")


class ResidualLinearModel(nn.Module):
    """Layers of `width` × `width` weights: sums have something to carry, and shards something to gather."""

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
    """A benchmark's command: the whole of it, or one of its processes."""
    if sys.argv[1:2] == ["--rank"]:
        *of, answer = sys.argv[2:]
        run_rank(*of, Path(answer))
        return 0
    return report(rows())


def timed(file: str, ranks: int, *arguments: str) -> dict[str, RivalTiming]:
    """The rivals' turns as the first of the processes measured them; each runs `file --rank ARGUMENTS ANSWER`."""
    with tempfile.TemporaryDirectory() as answers:
        answer = Path(answers) / "times.json"
        with _processes(file, ranks, [*arguments, str(answer)]) as processes:
            codes = [process.wait() for process in processes]
        assert not any(codes), f"exit codes {codes}"
        return {name: RivalTiming(tuple(rounds)) for name, rounds in json.loads(answer.read_text()).items()}


def beyond(times: dict[str, RivalTiming]) -> FigureSpread:
    """Milliseconds per micro-batch that ours takes longer."""
    pairs = zip(*(times[who].rounds_s for who in RIVALS), strict=True)
    each = sorted((ours - bare) / (TURN * MICRO) * 1e3 for ours, bare in pairs)
    return FigureSpread(each[len(each) // 2], each[0], each[-1])


def place_here() -> LauncherEnvironment:
    """Which of the processes this is."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return LauncherEnvironment(rank, ranks, rank, ranks)


class _AlternatingSink:
    """A sink of the run: after every `TURN` steps of ours it is the other's turn, in the middle of the training."""

    def __init__(self, run: TrainingRun, bare: Callable[[], None]) -> None:
        self._sink, self._parallel, self._bare = run.context.sink, run.process_group, bare
        self.times: dict[str, list[float]] = {who: [] for who in RIVALS}
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
        """All processes together, and without what the other left to clean up."""
        gc.collect(0)
        self._parallel.all_reduce_max([0])
        self._begun = time.perf_counter()


def measure(run: TrainingRun, bare: Callable[[int], None], micro: int, answer: Path) -> None:
    """A rank's side: both rivals in turns. `bare` is told the micro-batches of a window."""
    from supertuner.train.loop import train

    turns = _AlternatingSink(run, lambda: bare(micro))
    run.context = replace(run.context, sink=turns)
    gc.disable()
    train(run)
    gc.enable()
    if run.process_group.rank == 0:
        answer.write_text(json.dumps({who: found[WARM_UP:] for who, found in turns.times.items()}))


def samples(run: TrainingRun) -> Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Gives (clean, noise, level) of a micro-batch, of tensors that lie ready in memory."""
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
    """The run of one of several processes, with every report that a user gets by default."""
    from supertuner.arena.run_context import RunContext
    from supertuner.config.sources.load import load_config
    from supertuner.distributed.torch_process_group import open_process_group
    from supertuner.distributed.watchdog.heartbeat import Heartbeat, HeartbeatProgress, HeartbeatSink
    from supertuner.tools.session import open_session
    from supertuner.tools.training import open_report_sinks
    from supertuner.train.setup import open_run

    torch.set_num_threads(1)
    config = folder / f"{name}.json"
    if place.is_main_process:
        windows = {"batch_size": BATCH, "gradient_accumulation_steps": micro, "max_steps": STEPS}
        # fp32: what the peer computes in
        made = write_config(folder, train={**windows, "mixed_precision": "fp32"}, run={"name": name}, **settings)
        made.rename(config)
    while not config.exists():  # the first writes it
        time.sleep(0.01)
    loaded, pulse = load_config(config), Heartbeat()
    with ExitStack() as opened:

        def enter(one: AbstractContextManager[Any]) -> Any:
            return opened.enter_context(one)

        parallel = enter(open_process_group(loaded.config.parallel, place, torch.device("cpu"), pulse))
        work = enter(open_session(loaded, place))
        sink = HeartbeatSink(open_report_sinks(work, opened), pulse)
        context = RunContext(work.run_dir, sink, HeartbeatProgress(work.console, pulse), work.host)
        yield enter(open_run(work.config, context, process_group=parallel))


@contextmanager
def _processes(file: str, ranks: int, arguments: list[str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The file as a launcher would start it; whatever happens, none is left."""
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
