"""What the ranks of a node run in tests of one copy of the data: staging, and caches, without a group of torch's."""

from __future__ import annotations

import hashlib
import threading
from contextlib import ExitStack
from pathlib import Path

import torch

from supertuner.config.settings.tree import RunConfig
from supertuner.config.sources.launcher import Launched
from supertuner.core.events import Silence
from supertuner.core.host import Host
from supertuner.data.opened import open_corpus
from tests.cache.encoding import batches, counted, encoding_of, opened, served, tiny
from tests.cache.together import met, until_all
from tests.data.staging import Told


def stage(place: Launched, tmp: Path, config: RunConfig, hold: str = "") -> tuple[Told, dict[str, bytes], bytes]:
    """Open the corpus; what was told, what is staged, and the order. The first process stops for ever in the phase
    whose title begins with `hold`."""

    def when(title: str) -> None:
        if hold and title.startswith(hold):
            (tmp / "waiting").touch()
            threading.Event().wait()

    told = Told(when)
    with (
        met(tmp, place) as peers,
        open_corpus(config, host=Host(), sink=told, progress=told, peers=peers) as corpus,
    ):
        (part,) = corpus.parts
        found = {part.samples.key(i): bytes(part.samples.media(i)) for i in range(len(part.samples))}
        order = corpus.order.slice(0, 100).sample.tobytes()
        until_all(tmp / "barrier", "staged", place.rank, place.ranks)
    told._when = None  # type: ignore[assignment]  # a function of ours cannot go back to the test
    return told, found, order


def digests(of: dict[int, tuple[dict, dict]]) -> dict[int, str]:
    """What was served at each position, as a digest of names, types, shapes and bits."""
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
    place: Launched, tmp: Path, config: RunConfig, model: Path, epochs: int, idle: bool, until: int | None
) -> tuple[int, list[str], dict[int, str]]:
    """Serve all epochs from caches that the ranks fill together; what was encoded here, and what was served.

    With `idle`, all ranks but the first ask for nothing: no sample is theirs.
    """
    family, read = tiny("wan2.2", model)
    family, count = counted(family)
    with met(tmp, place) as peers, opened(config, encoding_of(family, read), peers=peers, until=until) as run:
        before = count.samples, len(count.captions)
        until_all(tmp / "barrier", "opened", place.rank, place.ranks)
        found = {} if idle and place.rank else digests(served(*run, epochs=epochs))
        until_all(tmp / "barrier", "served", place.rank, place.ranks)
    return before[0], count.captions, found


def refuse(place: Launched, tmp: Path, config: RunConfig, model: Path, rank: int, then: str) -> None:
    """The encoder of one rank fails, or waits for ever, at its first sample."""
    import dataclasses

    family, read = tiny("wan2.2", model)

    class Media:
        def __init__(self, *of) -> None:
            self.inner = family.media_encoder(*of)

        def encode(self, media):
            until_all(tmp / "barrier", "encoding", place.rank, place.ranks)
            if place.rank == rank:
                if then == "fail":
                    from supertuner.core.errors import CacheError

                    raise CacheError("the encoder broke; mend it")
                (tmp / "waiting").touch()
                threading.Event().wait()
            return self.inner.encode(media)

    changed = dataclasses.replace(family, media_encoder=Media)
    with ExitStack() as stack:
        peers = stack.enter_context(met(tmp, place))
        corpus, encoded = stack.enter_context(opened(config, encoding_of(changed, read), Silence(), peers=peers))
        for micro in batches(corpus, 2):
            encoded.latents(micro)
