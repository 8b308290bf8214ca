"""What the ranks of a node do in tests of one copy of the data: staging and caches, without a torch process group."""

from __future__ import annotations

import hashlib
import threading
from contextlib import ExitStack
from pathlib import Path

import torch

from supertuner.arena.run_context import RunContext
from supertuner.config.settings.run_config import RunConfig
from supertuner.config.sources.launcher import LauncherEnvironment
from supertuner.core.events import NullSink
from supertuner.core.host import HostFacts
from supertuner.data.corpus_loader import open_corpus
from tests.cache.peer_processes import meet_peers, until_all
from tests.data.staging import RecordingSink
from tests.train.encoding.encoding_helpers import (
    batches,
    encoding_spec,
    open_run,
    read_all_positions,
    tiny,
    with_counting_encoders,
)


def stage(
    place: LauncherEnvironment, tmp: Path, config: RunConfig, hold: str = ""
) -> tuple[RecordingSink, dict[str, bytes], bytes]:
    """Open the corpus; returns the events, what is staged, and the order. Rank 0 waits for ever in the phase whose
    title begins with `hold`."""

    def when(title: str) -> None:
        if hold and title.startswith(hold):
            (tmp / "waiting").touch()
            threading.Event().wait()

    sink = RecordingSink(when)
    with (
        meet_peers(tmp, place) as peers,
        open_corpus(config, RunContext(tmp, sink, sink, HostFacts(), peers)) as corpus,
    ):
        (part,) = corpus.datasets
        found = {part.samples.key(i): bytes(part.samples.media(i)) for i in range(len(part.samples))}
        order = corpus.order.slice(0, 100).sample.tobytes()
        until_all(tmp / "barrier", "staged", place.rank, place.world_size)
    sink._on_phase = None  # type: ignore[assignment]  # a local function cannot be pickled
    return sink, found, order


def digests(of: dict[int, tuple[dict, dict]]) -> dict[int, str]:
    """For each position a digest of names, dtypes, shapes and bits of its tensors."""
    found = {}
    for position, both in of.items():
        digest = hashlib.sha256()
        for fields in both:
            for name, one in sorted(fields.items()):
                digest.update(f"{name} {one.dtype} {tuple(one.shape)}".encode())
                digest.update(one.contiguous().view(torch.uint8).numpy().tobytes())
        found[position] = digest.hexdigest()
    return found


def encode(
    place: LauncherEnvironment, tmp: Path, config: RunConfig, model: Path, epochs: int, idle: bool, until: int | None
) -> tuple[int, list[str], dict[int, str]]:
    """Read all epochs from caches that the ranks fill together; returns what was encoded here, and what was read.

    With `idle`, all ranks but rank 0 request nothing: they have no samples.
    """
    family, read = tiny("wan2.2", model)
    family, count = with_counting_encoders(family)
    with (
        meet_peers(tmp, place) as peers,
        open_run(config, encoding_spec(family, read), peers=peers, until=until) as run,
    ):
        before = count.samples, len(count.captions)
        until_all(tmp / "barrier", "opened", place.rank, place.world_size)
        found = {} if idle and place.rank else digests(read_all_positions(*run, epochs=epochs))
        until_all(tmp / "barrier", "served", place.rank, place.world_size)
    return before[0], count.captions, found


def refuse(place: LauncherEnvironment, tmp: Path, config: RunConfig, model: Path, rank: int, then: str) -> None:
    """The encoder of one rank fails, or hangs, at its first sample."""
    import dataclasses

    family, read = tiny("wan2.2", model)

    class Media:
        def __init__(self, *of) -> None:
            self.inner = family.build_media_encoder(*of)

        def encode(self, media):
            until_all(tmp / "barrier", "encoding", place.rank, place.world_size)
            if place.rank == rank:
                if then == "fail":
                    from supertuner.core.errors import CacheError

                    raise CacheError("the encoder broke; mend it")
                (tmp / "waiting").touch()
                threading.Event().wait()
            return self.inner.encode(media)

    changed = dataclasses.replace(family, build_media_encoder=Media)
    with ExitStack() as stack:
        peers = stack.enter_context(meet_peers(tmp, place))
        corpus, encoded = stack.enter_context(open_run(config, encoding_spec(changed, read), NullSink(), peers=peers))
        for micro in batches(corpus, 2):
            encoded.latents(micro)
