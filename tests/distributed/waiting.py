"""What ranks do under the watchdog while one waits for the other in another way than in a plain collective."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from supertuner.config.settings.parallel import ParallelSettings
from supertuner.config.settings.run_config import RunConfig
from supertuner.config.sources.launcher import LauncherEnvironment
from supertuner.core.events import Event, MeasurementEvent, NullSink
from supertuner.distributed.gradient_sum import all_reduce_tensors
from supertuner.distributed.torch_process_group import open_process_group
from supertuner.distributed.watchdog.heartbeat import Heartbeat
from tests.cache.peer_processes import meet_peers, until_all
from tests.distributed.watched import VERY_LONG_S, log_to
from tests.train.encoding.encoding_helpers import batches, encoding_spec, open_run, tiny

CPU = torch.device("cpu")


def _hang() -> None:
    time.sleep(VERY_LONG_S)


def work(seconds: float = 5.0) -> None:
    """Use the CPU for this many seconds of wall time, so that the others wait that long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))


DEEDS: dict[str, Callable[[], None]] = {"hangs": _hang, "works": work}


def one_waits(place: LauncherEnvironment, logs: Path, how: str, timeout_s: float) -> None:
    """Rank 1 hangs in Python, and rank 0 waits for it."""
    log_to(logs, place)
    heartbeat = Heartbeat()
    with open_process_group(ParallelSettings(timeout_s=timeout_s, strategy="fsdp"), place, CPU, heartbeat) as parallel:
        module = nn.Linear(8, 8)
        fully_shard(module)
        loss = module(torch.ones(2, 8)).sum()
        parallel.all_reduce_max([1])
        if place.rank == 1:
            time.sleep(timeout_s / 4)
            heartbeat.mark()  # later than rank 0: the rank that was idle for longest is not the one at fault
            _hang()
        if how == "in a sum":
            all_reduce_tensors([torch.ones(3)])
        elif how == "for weights":
            module(torch.ones(2, 8))
        else:
            torch.autograd.backward(loss)


class _FirstEpoch(NullSink):
    """Sets an event when the first epoch's entries are made."""

    def __init__(self) -> None:
        self.made = threading.Event()

    def emit(self, event: Event, /) -> None:
        if isinstance(event, MeasurementEvent) and event.what == "cache.epoch":
            self.made.set()


def one_wants_an_epoch(
    place: LauncherEnvironment, tmp: Path, config: RunConfig, model: Path, then: str, timeout_s: float
) -> str:
    """Rank 0 reaches an epoch of which rank 1 makes a part in a thread, after rank 1 has finished a window; at an
    entry of it, rank 1 does `then`."""
    log_to(tmp, place)
    family, read = tiny("wan2.2", model)
    first, heartbeat = _FirstEpoch(), Heartbeat()

    class Media:
        def __init__(self, *of: Any) -> None:
            self.inner = family.build_media_encoder(*of)
            self.begun = False

        def encode(self, media: Any) -> Any:
            if first.made.is_set() and not self.begun:
                self.begun = True
                until_all(tmp / "barrier", "encoding", place.rank, place.world_size)
                if place.rank == 1:
                    DEEDS[then]()
            return self.inner.encode(media)

    encoding = encoding_spec(dataclasses.replace(family, build_media_encoder=Media), read)
    with (
        open_process_group(ParallelSettings(timeout_s=timeout_s), place, CPU, heartbeat) as parallel,
        meet_peers(tmp, place) as peers,
        open_run(config, encoding, first, peers=peers) as (corpus, encoded),
    ):
        parallel.all_reduce_max([1])
        heartbeat.step = 1
        heartbeat.mark(in_window=True)
        if place.rank == 0:
            encoded.latents(batches(corpus, 2)[-1])
        parallel.all_reduce_max([1])
    return "trained"


def one_compiles(place: LauncherEnvironment, logs: Path, timeout_s: float) -> str:
    """Rank 1 compiles in a pass of a later window, as for a new shape."""
    log_to(logs, place)
    heartbeat = Heartbeat()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        work()
        return graph.forward

    with open_process_group(ParallelSettings(timeout_s=timeout_s), place, CPU, heartbeat) as parallel:
        parallel.all_reduce_max([1])
        heartbeat.step = 1
        heartbeat.mark(in_window=True)
        if place.rank == 1:
            torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
        parallel.all_reduce_max([1])
        if place.rank == 0:  # a rank that waited that long may take a moment before its next sign of life
            time.sleep(timeout_s / 4)
    return "trained"
