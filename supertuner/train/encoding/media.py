"""Which encoded media a corpus needs, under which keys, and where a batch finds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from supertuner.cache.entries import Refs
from supertuner.cache.keys import Keys, Space, no_keys
from supertuner.data.batching.augment import Change
from supertuner.data.batching.render import change_of
from supertuner.data.cache_policy import How, Treatment
from supertuner.data.content import transform, why_media_vary
from supertuner.data.corpus import Corpus, Part
from supertuner.data.ordering.buckets import Bucket
from supertuner.data.ordering.order import Draws

NO_KEY = b""


@dataclass(frozen=True, eq=False, slots=True)
class MediaPlan:
    """Everything that is cached once: for each group its samples in each turn that is kept."""

    jobs: Draws
    """What to make: group, sample and turn (`cycle`); the other columns have no meaning."""
    keys: Keys
    """One for each job; NO_KEY for what is not needed."""
    begins: tuple[int | None, ...]
    """For each group of the order, where its jobs begin; None if it is not cached."""
    turns: tuple[int, ...]
    """For each group, how many turns are kept."""


class MediaTable:
    """From draws to entries: arrays, no hashing."""

    def __init__(self, corpus: Corpus, begins: Sequence[int | None], turns: Sequence[int], refs: Refs) -> None:
        """`begins` and `turns` are the plan's, and `refs` has one for each of its jobs."""
        self._members = [group.members for group in corpus.order.groups]
        self._turns = turns
        self._refs = [
            None if begin is None else refs[begin : begin + kept * len(members)].reshape(kept, len(members))
            for begin, kept, members in zip(begins, turns, self._members, strict=True)
        ]

    def holds(self, group: int) -> bool:
        return self._refs[group] is not None

    def find(self, group: int, samples: NDArray[np.int64], turns: NDArray[np.int64]) -> Refs:
        """Where the entries of samples of one group are."""
        table = self._refs[group]
        assert table is not None, f"group {group} is not cached"
        places = np.searchsorted(self._members[group], samples.astype(np.uint32))
        found: Refs = table[turns % self._turns[group], places]
        return found


def media_plan(corpus: Corpus, treatments: Sequence[Treatment], space: Space, until: int | None) -> MediaPlan:
    """Jobs and keys. With `until`, a position inside the first epoch, only samples drawn before it."""
    drawn = drawn_before(corpus, until)
    groups = corpus.order.groups
    treated = [treatments[group.dataset] for group in groups]
    turns = tuple(one.media_turns for one in treated)
    jobs, begins, count = [], [], 0
    for number, group in enumerate(groups):
        cached = treated[number].media is How.CACHED
        begins.append(count if cached else None)
        if cached:
            jobs.append(_jobs(number, group.members, turns[number]))
            count += len(jobs[-1])
    every = _joined(jobs)
    keys = draw_keys(corpus, every, space)
    for number, begin in enumerate(begins):
        if drawn is not None and begin is not None:
            rows = slice(begin, begin + turns[number] * len(groups[number].members))
            keys[rows][~np.isin(every.sample[rows], drawn[number])] = NO_KEY
    return MediaPlan(every, keys, tuple(begins), turns)


def draw_keys(corpus: Corpus, draws: Draws, space: Space) -> Keys:
    """The key of each draw's media, from its bytes, its bucket and the change of its turn."""
    keys = np.zeros(len(draws), no_keys().dtype)
    contents: dict[int, NDArray[np.uint64]] = {}
    for number in np.unique(draws.group).tolist():
        rows = np.flatnonzero(draws.group == number)
        group = corpus.order.groups[number]
        part = corpus.parts[group.dataset]
        if group.dataset not in contents:
            contents[group.dataset] = part.samples.contents()
        content = [row.tobytes() for row in contents[group.dataset][draws.sample[rows]]]
        if (originals := part.originals) is not None:
            samples = draws.sample[rows].tolist()
            content = [row + originals.mark(sample) for row, sample in zip(content, samples, strict=True)]
        keys[rows] = _group_keys(corpus.seed, part, group.bucket, content, draws.take(rows), space)
    return keys


def _group_keys(seed: int, part: Part, bucket: Bucket, rows: list[bytes], draws: Draws, space: Space) -> Keys:
    """Keys of draws of one group. Samples that never change share a transform, and a million take a second."""
    if not why_media_vary(part.settings):
        return space.keys(rows, transform(part.settings, bucket, Change()))
    keys = np.zeros(len(draws), no_keys().dtype)
    for at, (row, sample, turn) in enumerate(zip(rows, draws.sample.tolist(), draws.cycle.tolist(), strict=True)):
        change = change_of(seed, part, sample, turn)
        keys[at] = space.keys([row], transform(part.settings, bucket, change))[0]
    return keys


def job_sizes(corpus: Corpus, jobs: Draws) -> Callable[[NDArray[np.intp]], NDArray[np.float64]]:
    """For places of jobs, how large their latents are in relation to each other: like the media that they are of."""
    volume = np.array([_volume(corpus.parts[group.dataset], group.bucket) for group in corpus.order.groups])

    def sizes(places: NDArray[np.intp]) -> NDArray[np.float64]:
        found: NDArray[np.float64] = volume[jobs.group[places]]
        return found

    return sizes


def _volume(part: Part, bucket: Bucket) -> float:
    original = 0 if part.originals is None else 3 * prod(part.originals.size(bucket))
    return float(prod(bucket.shape) + original)


def drawn_before(corpus: Corpus, until: int | None) -> list[NDArray[np.int64]] | None:
    """For each group the samples drawn before a position; None if that is at least an epoch, and so all of them."""
    if until is None or until >= corpus.order.epoch_length(0):
        return None
    draws = corpus.order.slice(0, until)
    return [np.unique(draws.sample[draws.group == number]) for number in range(len(corpus.order.groups))]


def _jobs(group: int, members: NDArray[np.uint32], turns: int) -> Draws:
    sample = np.tile(members.astype(np.int64), turns)
    cycle = np.repeat(np.arange(turns, dtype=np.int64), len(members))
    none = np.zeros(len(sample), np.int64)
    return Draws(none, none, np.full(len(sample), group, np.int64), sample, cycle)


def _joined(jobs: Sequence[Draws]) -> Draws:
    if not jobs:
        return _jobs(0, np.zeros(0, np.uint32), 1)
    columns = ((one.position, one.epoch, one.group, one.sample, one.cycle) for one in jobs)
    return Draws(*map(np.concatenate, zip(*columns, strict=True)))
