"""What training in shards costs beside the model: milliseconds per micro-batch beyond a bare FSDP2 loop.

Both rivals run in the same two processes, one thread each, and take turns: ours is the whole engine with
`parallel.strategy: fsdp` and all weights trained; the peer is torch's `fully_shard` on each block of the same module,
over tensors that lie ready in memory, its gradients added up in the last micro-batch of a window only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the ranks run this file as a script

from benchmarks.harness import Row, Spread, Timing, at_most, in_memory_folder, interleave, report, say
from benchmarks.runs import nearly_nothing, rewind, write_config
from supertuner.config.launched import Launched
from supertuner.train.run import Run

RANKS, STEPS, MICRO, BATCH, ROUNDS = 2, 40, 4, 4, 5
"""Processes, windows of a round, micro-batches of a window and process, samples of a micro-batch."""
LIMIT_MS = 1.0
LAYERS, WIDTH = 4, 256


class Blocks(nn.Module):
    """A quarter of a million weights in four blocks."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
            self.last = nn.Linear(WIDTH, 1)

    def forward(self, noisy: torch.Tensor) -> torch.Tensor:
        hidden = noisy.flatten(1)[:, :WIDTH]
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        predicted: torch.Tensor = noisy + self.last(hidden).mean()
        return predicted


def rows() -> list[Row]:
    with in_memory_folder() as folder, tempfile.TemporaryDirectory() as answers:
        answer = Path(answers) / "times.json"
        with _processes([str(folder), str(answer)]) as processes:
            codes = [process.wait() for process in processes]
        assert not any(codes), f"exit codes {codes}"
        ours, bare = (Timing(tuple(json.loads(answer.read_text())[name])) for name in ("ours", "bare"))
    say(f"ours {ours}, bare {bare} for {STEPS} windows of {RANKS}×{MICRO}×{BATCH}")
    each = sorted((a - b) / (STEPS * MICRO) * 1e3 for a, b in zip(ours.rounds_s, bare.rounds_s, strict=True))
    beyond = Spread(each[len(each) // 2], each[0], each[-1])
    name = "two processes, beyond bare FSDP2, per micro-batch (all weights)"
    return [at_most(name, beyond, LIMIT_MS, unit="ms", note=f"ours / bare {ours.median_s / bare.median_s:.2f}")]


@contextmanager
def _processes(arguments: list[str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """This file as a launcher would start it; whatever happens, none is left."""
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(hours=1))
    begun: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(RANKS):
            environ = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "WORLD_SIZE": str(RANKS),
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


def run_rank(folder: Path, answer: Path) -> None:
    """A rank's side: both rivals in turns, each begun by all processes together."""
    from supertuner.train.loop import train

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    with _opened(folder, Launched(rank, RANKS, rank, RANKS)) as run:
        _lighten(run)

        def ours() -> None:
            run.parallel.agree([0])
            rewind(run)
            train(run)

        times = interleave({"ours": ours, "bare": _bare(run)}, ROUNDS)
    if rank == 0:
        answer.write_text(json.dumps({name: timing.rounds_s for name, timing in times.items()}))


@contextmanager
def _opened(folder: Path, place: Launched) -> Iterator[Run]:
    """The run of one of several processes, with every report that a user gets by default."""
    from supertuner.config.load import load
    from supertuner.tools.session import session
    from supertuner.tools.training import with_reports
    from supertuner.train.many.opening import open_parallel
    from supertuner.train.many.pulse import MarkedProgress, MarkedSink, Pulse
    from supertuner.train.setup import Outside, open_run

    config = folder / "shards.json"
    if place.first:
        windows = {"batch_size": BATCH, "gradient_accumulation_steps": MICRO, "max_steps": STEPS}
        made = write_config(
            folder,
            train={**windows, "mixed_precision": "fp32"},
            adapter={"type": "full"},
            parallel={"strategy": "fsdp"},
            model={"experts": "low_noise"},
        )
        made.rename(config)
    while not config.exists():  # the first writes it
        time.sleep(0.01)
    loaded, pulse = load(config), Pulse()
    with ExitStack() as opened:
        parallel = opened.enter_context(open_parallel(loaded.config.parallel, place, torch.device("cpu"), pulse))
        work = opened.enter_context(session(loaded, place))
        sink = MarkedSink(with_reports(work, opened), pulse)
        outside = Outside(sink, MarkedProgress(work.console, pulse), work.host)
        yield opened.enter_context(open_run(work.config, work.path.name, work.path, outside, parallel=parallel))


def _lighten(run: Run) -> None:
    """Let the run train another module; data, caches, logs and reports stay as they are."""
    from supertuner.models.adapters import Trained
    from supertuner.optim.table import build
    from supertuner.step.window import Trainee

    (trainee,), sharing = run.trainees, run.parallel.sharing
    assert sharing is not None
    module, expert = Blocks(), trainee.expert
    trained = sharing.share_out(Trained(expert.name, "full", module, dict(module.named_parameters())))
    parameters = dict(trained.parameters)
    run.rules = replace(run.rules, denoise=nearly_nothing)
    run.trainees = (Trainee(expert, module, parameters, build(run.config.optimizer, parameters, expert.name)),)
    run.trained = {expert.name: trained}


def _bare(run: Run) -> Callable[[], None]:
    """The same mathematics as a person would write it down."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from supertuner.data.ordering.windows import micro_batches

    order = run.maker.corpus.order
    micros = micro_batches(order, range(order.epoch_length(0)), 1)
    latents = torch.cat([run.maker.encoded.latents(micro)["latents"] for micro in micros])
    texts = [run.maker.encoded.texts(micro)[0] for micro in micros]
    module: Any = Blocks()
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in (*module.layers, module):
        fully_shard(block, mesh=mesh)
        block.set_gradient_divide_factor(1.0)
        block.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)

    def loop() -> None:
        run.parallel.agree([0])
        for _ in range(STEPS):
            total = torch.zeros(())
            for number in range(MICRO):
                picked = torch.randint(len(latents), (BATCH,))
                clean = latents[picked].float()
                run.family.pad_text(run.model, [texts[row] for row in picked.tolist()])
                noise = torch.randn(clean.shape)
                level = torch.sigmoid(torch.randn(BATCH)).view(-1, 1, 1, 1, 1)
                module.set_requires_gradient_sync(number == MICRO - 1)
                predicted = module((1 - level) * clean + level * noise)
                each = (predicted - (noise - clean)).square().flatten(1).mean(1)
                (each.sum() / (BATCH * MICRO * RANKS)).backward()
                total += each.detach().sum()
            torch.distributed.all_reduce(total)
            norm: Any = torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
            norm.full_tensor()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            float(total)

    return loop


def main() -> int:
    if sys.argv[1:2] == ["--rank"]:
        folder, answer = sys.argv[2:]
        run_rank(Path(folder), Path(answer))
        return 0
    return report(rows())


if __name__ == "__main__":
    raise SystemExit(main())
