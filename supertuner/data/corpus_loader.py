"""A configuration's data, ready for batches: every dataset staged or found, its buckets shared, all in one order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from supertuner.arena.format import ArenaLifetime
from supertuner.arena.home import ArenaHome
from supertuner.arena.node_peers import NO_PEERS, NodePeers
from supertuner.config.settings.data import DatasetSettings
from supertuner.config.settings.run_config import RunConfig
from supertuner.core.errors import SourceError
from supertuner.core.events import Progress, Sink, WarningEvent
from supertuner.core.host import HostFacts
from supertuner.data.arena_homes import dataset_home
from supertuner.data.corpus import Corpus, build_corpus
from supertuner.data.ordering.bucket_members import BucketMembers, shared_bucket_members
from supertuner.data.samples import SampleCollection
from supertuner.data.staging.follower import follow_staging
from supertuner.data.staging.stager import DatasetStager


@contextmanager
def open_corpus(
    config: RunConfig,
    *,
    host: HostFacts,
    sink: Sink,
    progress: Progress,
    life: ArenaLifetime | None = None,
    peers: NodePeers = NO_PEERS,
) -> Iterator[Corpus]:
    """Stage what is not staged yet, tell which samples fit no bucket, give the corpus; leaving closes the datasets.

    `life` is how long a fresh arena stays, if not as `arena.keep` says. Of the processes of a node the first stages and
    tells; the others follow it.
    """
    arena_life = config.arena.keep if life is None else life
    homes: dict[str, ArenaHome] = {}
    with ExitStack() as stack:
        datasets: list[tuple[DatasetSettings, SampleCollection]] = []
        for stager, dataset, key_path in dataset_stagers(config, host, sink, progress, arena_life, peers):
            homes[dataset.id] = stager.home
            if peers.is_first:
                _, staged = stager.open(dataset, key_path)
            else:
                staged = follow_staging(stager.home, dataset.id, stager.verify, peers, progress)
            stack.callback(staged.close)
            datasets.append((dataset, staged))

        def members(settings: DatasetSettings, samples: SampleCollection) -> BucketMembers:
            return shared_bucket_members(settings, samples, homes[settings.id], arena_life)

        corpus = build_corpus(
            datasets,
            seed=config.run.seed,
            batch_size=config.train.batch_size,
            drop_last=config.loader.drop_last,
            assign=members,
        )
        if peers.is_first:
            warn_unused_samples(corpus, sink)
        yield corpus


def select_datasets(config: RunConfig, *, held_out: bool) -> RunConfig | None:
    """The configuration with only those datasets that are trained on, or held out; None if there are none."""
    datasets = tuple(dataset for dataset in config.datasets if dataset.held_out is held_out)
    return config.model_copy(update={"datasets": datasets}) if datasets else None


def dataset_stagers(
    config: RunConfig, host: HostFacts, sink: Sink, progress: Progress, life: ArenaLifetime, peers: NodePeers = NO_PEERS
) -> Iterator[tuple[DatasetStager, DatasetSettings, str]]:
    """For each dataset, who stages it, and what its block is called in the configuration."""
    if not config.datasets:
        raise SourceError("the configuration names no dataset; add one under datasets")
    for index, dataset in enumerate(config.datasets):
        home = dataset_home(dataset, config)
        stager = DatasetStager(home, host, sink, progress, life=life, verify=config.arena.verify, peers=peers)
        yield stager, dataset, f"datasets[{index}]"


def warn_unused_samples(corpus: Corpus, sink: Sink) -> None:
    """Each sample that fits no bucket, with its reason, and how many there are."""
    for dataset in corpus.datasets:
        for sample in dataset.unassigned_samples():
            sink.emit(sample)
        count, total = len(dataset.members.unassigned), len(dataset.samples)
        if count:
            text = f"{count} of {total} samples fit no bucket and are not used; the list says why"
            sink.emit(WarningEvent(f"datasets[{dataset.samples.id}]", text))
    unused_groups = corpus.order.never_drawn()
    if unused_groups:
        count = sum(len(group.sample_indices) for group in unused_groups)
        text = (
            f"{count} samples are never used: their {len(unused_groups)} buckets have fewer than train.batch_size each"
        )
        sink.emit(WarningEvent("loader.drop_last", f"{text} {corpus.order.batch_size}"))
