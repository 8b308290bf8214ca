"""Everything a run trains on: its datasets with their buckets, in one order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from supertuner.config.settings.data import Dataset
from supertuner.core.events import SetAside
from supertuner.data.ordering.assign import block_of, why_none
from supertuner.data.ordering.members import Members, members_of
from supertuner.data.ordering.order import Group, Order, rate_of
from supertuner.data.originals import Originals, originals_of
from supertuner.data.samples import Samples


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """One dataset of the corpus."""

    settings: Dataset
    samples: Samples
    members: Members
    originals: Originals | None = None
    """The pictures that its samples were made from, if it has them."""

    def left_out(self) -> Iterator[SetAside]:
        """Samples that fit no bucket, and why."""
        for number in self.members.left_out:
            row = block_of(self.samples, int(number), int(number) + 1)
            yield SetAside(self.samples.id, self.samples.key(int(number)), why_none(self.settings, row, 0))


@dataclass(frozen=True, eq=False, slots=True)
class Corpus:
    parts: tuple[Part, ...]
    order: Order
    seed: int


def corpus_of(
    datasets: Sequence[tuple[Dataset, Samples]],
    *,
    seed: int,
    batch_size: int,
    drop_last: bool = False,
    members: Callable[[Dataset, Samples], Members] = members_of,
) -> Corpus:
    """Put datasets in order. `members` finds a dataset's buckets: computed, or `shared_members` with a home."""
    parts = tuple(_part(settings, samples, members(settings, samples)) for settings, samples in datasets)
    groups = [
        Group(
            number,
            part.samples.id,
            bucket,
            part.members.of(place),
            rate_of(part.settings.repeats, part.settings.weight),
        )
        for number, part in enumerate(parts)
        for place, bucket in enumerate(part.members.buckets)
    ]
    return Corpus(parts, Order(groups, seed=seed, batch_size=batch_size, drop_last=drop_last), seed)


def _part(settings: Dataset, samples: Samples, members: Members) -> Part:
    return Part(settings, samples, members, originals_of(settings, samples, members))
