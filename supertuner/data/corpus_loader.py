"""Opens a configuration's data: stages each dataset or attaches to its arena, assigns buckets, orders the samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from supertuner.arena.format import ArenaLifetime
from supertuner.arena.home import ArenaHome
from supertuner.arena.run_context import RunContext
from supertuner.config.settings.data import DatasetSettings
from supertuner.config.settings.run_config import RunConfig
from supertuner.core.errors import ArenaError, ArenaMissingError, SourceError
from supertuner.core.events import Progress, Sink, WarningEvent
from supertuner.data.corpus import Corpus, build_corpus
from supertuner.data.ordering.bucket_members import BucketMembers, shared_bucket_members
from supertuner.data.ordering.sample_collection import SampleCollection
from supertuner.data.staging.arena_lookup import dataset_home_path, find_current_arena
from supertuner.data.staging.follower import follow_staging
from supertuner.data.staging.staged_dataset import StagedDataset
from supertuner.data.staging.stager import DatasetStager


@contextmanager
def open_corpus(config: RunConfig, context: RunContext, *, life: ArenaLifetime | None = None) -> Iterator[Corpus]:
    """Stage what is not staged yet and yield the corpus; on exit, close the datasets.

    `life` is the lifetime of new arenas; None: `arena.keep`. The first process of a node stages and emits events, for
    example about samples that fit no bucket; the others wait and attach to its arenas.
    """
    arena_life = config.arena.keep if life is None else life
    homes: dict[str, ArenaHome] = {}
    with ExitStack() as stack:
        datasets: list[tuple[DatasetSettings, SampleCollection]] = []
        for stager, dataset, key_path in dataset_stagers(config, context, arena_life):
            homes[dataset.id] = stager.home
            if context.peers.is_first:
                _, staged = stager.open(dataset, key_path)
            else:
                staged = follow_staging(stager.home, dataset.id, stager.verify, context)
            stack.callback(staged.close)
            datasets.append((dataset, staged))

        corpus = build_staged_corpus(config, datasets, homes, arena_life)
        if context.peers.is_first:
            warn_unused_samples(corpus, context.sink)
        yield corpus


@contextmanager
def open_staged_corpus(config: RunConfig, progress: Progress) -> Iterator[tuple[Corpus | None, dict[str, str]]]:
    """Yield the corpus of the datasets that are staged, or None if none is, and for each other one why it is not used.

    Stages nothing and writes nothing, so it also works without the sources and without free memory.
    """
    unstaged: dict[str, str] = {}
    with ExitStack() as stack:
        datasets: list[tuple[DatasetSettings, SampleCollection]] = []
        for settings in config.datasets:
            try:
                with progress.phase(f"listing {settings.id}"):
                    staged = stack.enter_context(_attach_staged(settings, config))
                if settings.conditioning_dir is not None:  # raises SourceError if a reference image is missing
                    build_corpus([(settings, staged)], seed=0, batch_size=1)
            except (ArenaError, SourceError) as error:
                unstaged[settings.id] = str(error)
            else:
                datasets.append((settings, staged))
        seed, batch_size = config.run.seed, config.train.batch_size
        drop_last = config.loader.drop_last
        yield (
            build_corpus(datasets, seed=seed, batch_size=batch_size, drop_last=drop_last) if datasets else None,
            unstaged,
        )


def _attach_staged(settings: DatasetSettings, config: RunConfig) -> StagedDataset:
    """The dataset in its existing arena. Raises ArenaMissingError if there is none."""
    home = dataset_home_path(settings, config)
    name = find_current_arena(home, settings)
    if not home.is_dir():
        raise ArenaMissingError(f"it is not staged: {home} does not exist")
    try:
        return StagedDataset.from_reader(ArenaHome(home).attach(name, may_remove=False))
    except ArenaMissingError as error:
        raise ArenaMissingError(f"it is not staged: there is no arena {name} in {home}") from error


def build_staged_corpus(
    config: RunConfig,
    datasets: Sequence[tuple[DatasetSettings, SampleCollection]],
    homes: Mapping[str, ArenaHome],
    life: ArenaLifetime = "until_removed",
) -> Corpus:
    """The corpus of staged datasets. Large bucket tables are shared in `homes`, the datasets' homes by id."""

    def assign(settings: DatasetSettings, samples: SampleCollection) -> BucketMembers:
        return shared_bucket_members(settings, samples, homes[settings.id], life)

    seed, batch_size = config.run.seed, config.train.batch_size
    return build_corpus(datasets, seed=seed, batch_size=batch_size, drop_last=config.loader.drop_last, assign=assign)


def select_datasets(config: RunConfig, *, held_out: bool) -> RunConfig | None:
    """The configuration with only its held-out datasets, or only the others; None if there are none."""
    datasets = tuple(dataset for dataset in config.datasets if dataset.held_out is held_out)
    return config.model_copy(update={"datasets": datasets}) if datasets else None


def dataset_stagers(
    config: RunConfig, context: RunContext, life: ArenaLifetime
) -> Iterator[tuple[DatasetStager, DatasetSettings, str]]:
    """For each dataset its stager, its settings, and the key path of its block in the configuration."""
    if not config.datasets:
        raise SourceError("the configuration names no dataset; add one under datasets")
    for index, dataset in enumerate(config.datasets):
        home = ArenaHome(dataset_home_path(dataset, config))
        yield DatasetStager(home, context, life=life, verify=config.arena.verify), dataset, f"datasets[{index}]"


def warn_unused_samples(corpus: Corpus, sink: Sink) -> None:
    """Emit an event for each sample that fits no bucket, with the reason, and warnings with their numbers."""
    for dataset in corpus.datasets:
        for sample in dataset.unassigned_samples():
            sink.emit(sample)
        if count := len(dataset.members.unassigned):
            text = f"{count} of {len(dataset.samples)} samples fit no bucket and are not used"
            text += "; the list of set-aside samples says why"
            sink.emit(WarningEvent(f"datasets[{dataset.samples.id}]", text))
    unused_groups = corpus.order.never_drawn()
    if unused_groups:
        count = sum(len(group.sample_indices) for group in unused_groups)
        limit = f"{corpus.order.batch_size} samples each (train.batch_size)"
        text = f"{count} samples are never used: their {len(unused_groups)} buckets have fewer than {limit}"
        sink.emit(WarningEvent("loader.drop_last", text))
