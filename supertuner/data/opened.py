"""A configuration's data, ready for batches: every dataset staged or found, its buckets shared, all in one order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from supertuner.arena.format import Life
from supertuner.arena.home import Home
from supertuner.arena.peers import ALONE, Peers
from supertuner.config.settings.data import Dataset
from supertuner.config.settings.tree import RunConfig
from supertuner.core.errors import SourceError
from supertuner.core.events import Progress, Sink, Warned
from supertuner.core.host import Host
from supertuner.data.corpus import Corpus, corpus_of
from supertuner.data.homes import home_of
from supertuner.data.ordering.members import Members, shared_members
from supertuner.data.samples import Samples
from supertuner.data.staging.follower import follow
from supertuner.data.staging.stage import Stager


@contextmanager
def open_corpus(
    config: RunConfig,
    *,
    host: Host,
    sink: Sink,
    progress: Progress,
    life: Life | None = None,
    peers: Peers = ALONE,
) -> Iterator[Corpus]:
    """Stage what is not staged yet, tell which samples fit no bucket, give the corpus; leaving closes the datasets.

    `life` is how long a fresh arena stays, if not as `arena.keep` says. Of the processes of a node the first stages and
    tells; the others follow it.
    """
    kept = config.arena.keep if life is None else life
    homes: dict[str, Home] = {}
    with ExitStack() as opened:
        datasets: list[tuple[Dataset, Samples]] = []
        for stager, dataset, place in stagers(config, host, sink, progress, kept, peers):
            homes[dataset.id] = stager.home
            if peers.first:
                _, staged = stager.open(dataset, place)
            else:
                staged = follow(stager.home, dataset.id, stager.verify, peers, progress)
            opened.callback(staged.close)
            datasets.append((dataset, staged))

        def members(settings: Dataset, samples: Samples) -> Members:
            return shared_members(settings, samples, homes[settings.id], kept)

        corpus = corpus_of(
            datasets,
            seed=config.run.seed,
            batch_size=config.train.batch_size,
            drop_last=config.loader.drop_last,
            members=members,
        )
        if peers.first:
            tell_left_out(corpus, sink)
        yield corpus


def portion(config: RunConfig, *, held_out: bool) -> RunConfig | None:
    """The configuration with only those datasets that are trained on, or held out; None if there are none."""
    datasets = tuple(dataset for dataset in config.datasets if dataset.held_out is held_out)
    return config.model_copy(update={"datasets": datasets}) if datasets else None


def stagers(
    config: RunConfig, host: Host, sink: Sink, progress: Progress, life: Life, peers: Peers = ALONE
) -> Iterator[tuple[Stager, Dataset, str]]:
    """For each dataset, who stages it, and what its block is called in the configuration."""
    if not config.datasets:
        raise SourceError("the configuration names no dataset; add one under datasets")
    for number, dataset in enumerate(config.datasets):
        home = home_of(dataset, config)
        stager = Stager(home, host, sink, progress, life=life, verify=config.arena.verify, peers=peers)
        yield stager, dataset, f"datasets[{number}]"


def tell_left_out(corpus: Corpus, sink: Sink) -> None:
    """Each sample that fits no bucket, with its reason, and how many there are."""
    for part in corpus.parts:
        for one in part.left_out():
            sink.emit(one)
        count, total = len(part.members.left_out), len(part.samples)
        if count:
            text = f"{count} of {total} samples fit no bucket and are not used; the list says why"
            sink.emit(Warned(f"datasets[{part.samples.id}]", text))
    never = corpus.order.never_drawn()
    if never:
        count = sum(len(group.members) for group in never)
        text = f"{count} samples are never used: their {len(never)} buckets have fewer than train.batch_size each"
        sink.emit(Warned("loader.drop_last", f"{text} {corpus.order.batch_size}"))
