"""What training on two processes costs beside the model: milliseconds per micro-batch beyond a bare loop.

Both rivals run in the same two processes, one thread each, and take turns: ours is the whole engine (caches, windows,
sums, agreement about signals, logs, reports, the watch), the peer is torch's DistributedDataParallel around the same
module over tensors that lie ready in memory, its gradients added up in the last micro-batch of a window only. For the
record: how much faster two processes are than one at the same number of samples per window.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the ranks run this file as a script

from benchmarks.harness import Row, Spread, Timing, at_most, in_memory_folder, interleave, noted, report, say
from benchmarks.runs import NearlyNothing, nearly_nothing, rewind, write_config
from supertuner.config.launched import Launched
from supertuner.models.spec import Tensors
from supertuner.train.run import Run

STEPS, MICRO, BATCH, ROUNDS = 100, 4, 4, 7
"""Windows of a round, micro-batches of a window and process, samples of a micro-batch."""
LIMIT_MS = 1.0
LAYERS, WIDTH = 32, 128


class Layers(nn.Module):
    """Half a million weights in 64 tensors, as an adapter has them: sums have something to carry."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, noisy: torch.Tensor) -> torch.Tensor:
        hidden = noisy.flatten(1)[:, :WIDTH]
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return noisy + hidden.mean()


MODELS: dict[str, Callable[[], nn.Module]] = {"one number": NearlyNothing, "64 tensors": Layers}


def rows() -> list[Row]:
    found = []
    with in_memory_folder() as folder:
        for model in MODELS:
            together, alone = _times(folder, model, 2), _times(folder, model, 1)
            beyond = _beyond(together["ours"], together["bare"])
            name = f"two processes, beyond bare DDP, per micro-batch ({model})"
            ratio = together["ours"].median_s / together["bare"].median_s
            say(f"{model}: ours {together['ours']}, bare {together['bare']} for {STEPS} windows of 2×{MICRO}×{BATCH}")
            found.append(at_most(name, beyond, LIMIT_MS, unit="ms", note=f"ours / bare {ratio:.2f}"))
            faster, peer = (alone[who].median_s / together[who].median_s for who in ("ours", "bare"))
            note = f"not interleaved; the bare loop: {peer:.2f}"
            found.append(noted(f"two processes against one, same windows ({model})", faster, note=note))
    return found


def _beyond(ours: Timing, bare: Timing) -> Spread:
    each = sorted((a - b) / (STEPS * MICRO) * 1e3 for a, b in zip(ours.rounds_s, bare.rounds_s, strict=True))
    return Spread(each[len(each) // 2], each[0], each[-1])


def _times(folder: Path, model: str, ranks: int) -> dict[str, Timing]:
    """The rivals' rounds as the first process measured them."""
    with tempfile.TemporaryDirectory() as answers:
        answer = Path(answers) / "times.json"
        with _processes(ranks, [str(folder), model, str(answer)]) as processes:
            codes = [process.wait() for process in processes]
        assert not any(codes), f"exit codes {codes}"
        return {name: Timing(tuple(rounds)) for name, rounds in json.loads(answer.read_text()).items()}


@contextmanager
def _processes(ranks: int, arguments: list[str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """This file as a launcher would start it; whatever happens, none is left."""
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
            command = [sys.executable, "-W", "ignore", __file__, "--rank", *arguments]
            quiet = None if rank == 0 else subprocess.DEVNULL
            begun.append(subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=quiet))
        yield begun
    finally:
        for process in begun:
            process.kill()
            process.wait()


def run_rank(folder: Path, model: str, answer: Path) -> None:
    """A rank's side: both rivals in turns, each begun by all processes together."""
    from supertuner.train.loop import train

    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = Launched(rank, ranks, rank, ranks)
    micro = 2 * MICRO // place.ranks
    windows: dict[str, Any] = {"batch_size": BATCH, "gradient_accumulation_steps": micro, "max_steps": STEPS}
    windows["mixed_precision"] = "fp32"  # what the peer computes in
    config = folder / f"config-{place.ranks}-{model.replace(' ', '-')}.json"
    with _opened(config, folder, windows, place) as run:
        _lighten(run, MODELS[model])

        def ours() -> None:
            run.parallel.agree([0])
            rewind(run)
            train(run)

        times = interleave({"ours": ours, "bare": _bare(run, MODELS[model](), micro)}, ROUNDS)
    if place.first:
        answer.write_text(json.dumps({name: timing.rounds_s for name, timing in times.items()}))


@contextmanager
def _opened(config: Path, folder: Path, windows: dict[str, Any], place: Launched) -> Iterator[Run]:
    """The run of one of several processes, with every report that a user gets by default."""
    from supertuner.config.load import load
    from supertuner.tools.session import session
    from supertuner.tools.training import with_reports
    from supertuner.train.many.opening import open_parallel
    from supertuner.train.many.pulse import MarkedProgress, MarkedSink, Pulse
    from supertuner.train.setup import Outside, open_run

    if place.first:
        made = write_config(folder, train=windows, run={"name": config.stem})
        made.rename(config)
    pulse = Pulse()
    with ExitStack() as opened:
        while not config.exists():  # the first writes it
            time.sleep(0.01)
        loaded = load(config)
        parallel = opened.enter_context(open_parallel(loaded.config.parallel, place, torch.device("cpu"), pulse))
        work = opened.enter_context(session(loaded, place))
        sink = MarkedSink(with_reports(work, opened), pulse)
        outside = Outside(sink, MarkedProgress(work.console, pulse), work.host)
        yield opened.enter_context(open_run(work.config, work.path.name, work.path, outside, parallel=parallel))


def _lighten(run: Run, make: Callable[[], nn.Module]) -> None:
    """Let the run train another module; data, caches, logs and reports stay as they are."""
    from supertuner.optim.table import build
    from supertuner.step.window import Trainee

    trainees = []
    for trainee in run.trainees:
        module = make()
        parameters = dict(module.named_parameters())
        trainees.append(
            Trainee(trainee.expert, module, parameters, build(run.config.optimizer, parameters, trainee.expert.name))
        )
    run.rules, run.trainees = replace(run.rules, denoise=_denoise), tuple(trainees)


def _denoise(
    module: nn.Module, noisy: torch.Tensor, levels: torch.Tensor, text: Tensors, conditions: Tensors
) -> torch.Tensor:
    return nearly_nothing(module, noisy, levels, text, conditions)


def _bare(run: Run, module: nn.Module, micro: int) -> Callable[[], None]:
    """The same mathematics as a person would write it down."""
    from torch.nn.parallel import DistributedDataParallel

    from supertuner.data.ordering.windows import micro_batches

    order, many = run.maker.corpus.order, run.parallel.ranks > 1
    micros = micro_batches(order, range(order.epoch_length(0)), 1)
    latents = torch.cat([run.maker.encoded.latents(micro)["latents"] for micro in micros])
    texts = [run.maker.encoded.texts(micro)[0] for micro in micros]
    wrapped: nn.Module = DistributedDataParallel(module) if many else module
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    def loop() -> None:
        run.parallel.agree([0])
        for _ in range(STEPS):
            total = torch.zeros(())
            for number in range(micro):
                rows = torch.randint(len(latents), (BATCH,))
                clean = latents[rows].float()
                run.family.pad_text(run.model, [texts[row] for row in rows.tolist()])
                noise = torch.randn(clean.shape)
                level = torch.sigmoid(torch.randn(BATCH)).view(-1, 1, 1, 1, 1)
                apart = isinstance(wrapped, DistributedDataParallel) and number < micro - 1
                with wrapped.no_sync() if apart else nullcontext():  # type: ignore[operator]
                    predicted = wrapped((1 - level) * clean + level * noise)
                    each = (predicted - (noise - clean)).square().flatten(1).mean(1)
                    (each.sum() / (BATCH * micro)).backward()
                total += each.detach().sum()
            if many:
                torch.distributed.all_reduce(total)
            torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            float(total)

    return loop


def main() -> int:
    if sys.argv[1:2] == ["--rank"]:
        folder, model, answer = sys.argv[2:]
        run_rank(Path(folder), model, Path(answer))
        return 0
    return report(rows())


if __name__ == "__main__":
    raise SystemExit(main())
