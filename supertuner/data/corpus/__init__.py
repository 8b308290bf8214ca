"""Corpus: all datasets of a run with their buckets, and the order of their samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from supertuner.config.settings.data import DatasetSettings
from supertuner.core.events import SetAsideEvent
from supertuner.data.corpus.reference_images import ReferenceImages, find_reference_images
from supertuner.data.ordering.bucket_assignment import no_bucket_reason
from supertuner.data.ordering.bucket_members import BucketMembers, assign_buckets
from supertuner.data.ordering.sample_collection import SampleCollection, slice_metadata
from supertuner.data.ordering.sample_order import BucketGroup, SampleOrder, draws_per_epoch


@dataclass(frozen=True, eq=False, slots=True)
class CorpusDataset:
    """One dataset of the corpus."""

    settings: DatasetSettings
    samples: SampleCollection
    members: BucketMembers
    references: ReferenceImages | None = None
    """The reference images of its samples, for editing models; None if it has none."""

    def unassigned_samples(self) -> Iterator[SetAsideEvent]:
        """Yield an event, with the reason, for each sample that fits no bucket and is therefore not used."""
        for sample in self.members.unassigned:
            row = slice_metadata(self.samples, int(sample), int(sample) + 1)
            yield SetAsideEvent(self.samples.id, self.samples.key(int(sample)), no_bucket_reason(self.settings, row, 0))


@dataclass(frozen=True, eq=False, slots=True)
class Corpus:
    datasets: tuple[CorpusDataset, ...]
    order: SampleOrder
    seed: int

    def dataset_of_group(self, group: int) -> CorpusDataset:
        """The dataset of a bucket group, given by its index in `order.groups`."""
        return self.datasets[self.order.groups[group].dataset_index]


def build_corpus(
    datasets: Sequence[tuple[DatasetSettings, SampleCollection]],
    *,
    seed: int,
    batch_size: int,
    drop_last: bool = False,
    assign: Callable[[DatasetSettings, SampleCollection], BucketMembers] = assign_buckets,
) -> Corpus:
    """Build the corpus. `assign` gives a dataset's buckets: `assign_buckets`, or `shared_bucket_members` of a home."""
    corpus_datasets: list[CorpusDataset] = []
    groups: list[BucketGroup] = []
    for index, (settings, samples) in enumerate(datasets):
        members = assign(settings, samples)
        references = find_reference_images(settings, samples, members)
        corpus_datasets.append(CorpusDataset(settings, samples, members, references))
        draws = draws_per_epoch(settings.repeats, settings.weight)
        for number, bucket in enumerate(members.buckets):
            groups.append(BucketGroup(index, samples.id, bucket, members.samples_in(number), draws))
    order = SampleOrder(groups, seed=seed, batch_size=batch_size, drop_last=drop_last)
    return Corpus(tuple(corpus_datasets), order, seed)
