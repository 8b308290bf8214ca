"""A configuration's staged samples as a torch map-style dataset, for anybody's DataLoader.

All processes of a node read one copy of the files: a worker process, forked or spawned, maps the arena of the process
that opened the dataset.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import Dataset

from supertuner.arena.home import ArenaHome
from supertuner.arena.run_context import RunContext
from supertuner.config.settings.run_config import RunConfig
from supertuner.config.sources.load import LoadedConfig
from supertuner.core.closing import CloseOnExit
from supertuner.core.errors import SourceError
from supertuner.core.events import NullSink, Progress, Sink
from supertuner.core.host import HostFacts
from supertuner.core.types import MediaKind
from supertuner.data.batching.render import caption_for_sample, render_sample
from supertuner.data.corpus import Corpus
from supertuner.data.corpus_loader import build_staged_corpus, open_corpus, select_datasets
from supertuner.data.ordering.sample_order import SampleDraws
from supertuner.data.staging.arena_lookup import dataset_home_path, require_paths
from supertuner.data.staging.fingerprint import arena_name
from supertuner.data.staging.staged_dataset import StagedDataset

DatasetSample: TypeAlias = dict[str, Any]
"""One sample: "image", "video" or "audio" → its tensor, "caption" → text, "key" → its name, "dataset" → its id."""


def open_dataset(
    config: LoadedConfig, *, held_out: bool = False, sink: Sink | None = None, progress: Progress | None = None
) -> ArenaDataset:
    """Open a configuration's datasets: attach to their arenas, and stage first what is not staged yet.

    The result is a context manager; `close()` releases the arenas.

    Args:
        config: The configuration; its `datasets`, `arena` and `run.seed` are used.
        held_out: True: only the datasets with `held_out: true`; False: only the others.
        sink: Receives decisions, warnings and set-aside files. None: they are discarded.
        progress: Shows the progress of staging. None: it is not shown.

    Raises:
        ConfigError: A folder of a dataset is missing, and no arena holds its samples.
        SourceError: There is no such dataset, or no sample is left to use.
        StageError: A dataset could not be staged.
    """
    require_paths(config)
    selected = select_datasets(config.config, held_out=held_out)
    if selected is None:
        kind = "held-out dataset" if held_out else "dataset to train on"
        raise SourceError(f"{config.source_name}: there is no {kind}; add one under datasets")
    silent = NullSink()
    context = RunContext(selected.run.output_dir, sink or silent, progress or silent, HostFacts())
    with ExitStack() as stack:
        corpus = stack.enter_context(open_corpus(selected, context))
        return ArenaDataset(selected, corpus, stack.pop_all())


class ArenaDataset(Dataset[DatasetSample], CloseOnExit):
    """Samples as training sees them: decoded, cropped and resized to their bucket, augmented, with a caption.

    Samples of different buckets have different shapes. `batches` groups them by bucket, and `collate` stacks them:

        loader = DataLoader(dataset, batch_sampler=dataset.batches(), collate_fn=dataset.collate, num_workers=2)

    A sample that belongs to the buckets of several resolutions occurs once per bucket. The values of a sample depend
    only on its file, its settings, `run.seed` and `epoch`.
    """

    def __init__(self, config: RunConfig, corpus: Corpus, resources: ExitStack) -> None:
        """`resources` are closed with the dataset."""
        self.epoch = 0
        """Selects the augmentation and the caption of each sample. Set it before an epoch begins: worker processes
        copy it when they start."""
        self._config, self._corpus, self._resources = config, corpus, resources
        sizes = [len(group.sample_indices) for group in corpus.order.groups]
        self._group_offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    def __len__(self) -> int:
        return int(self._group_offsets[-1])

    def __getitem__(self, index: int) -> DatasetSample:
        """The sample with this index. Raises BrokenMediaError if its file does not decode."""
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} samples")
        group_index = bisect_right(self._group_offsets, index) - 1
        group = self._corpus.order.groups[group_index]
        dataset, seed = self._corpus.datasets[group.dataset_index], self._corpus.seed
        sample = int(group.sample_indices[index - int(self._group_offsets[group_index])])
        dtype = torch.float32 if group.bucket.kind is MediaKind.AUDIO else torch.uint8
        media = torch.empty(group.bucket.shape, dtype=dtype)
        render_sample(seed, dataset, sample, self.epoch, group.bucket, media)
        return {
            group.bucket.kind.value: media,
            "caption": caption_for_sample(seed, dataset, sample, self.epoch),
            "key": dataset.samples.key(sample),
            "dataset": dataset.samples.id,
        }

    def batches(self, epoch: int = 0) -> list[list[int]]:
        """Indices of the batches of an epoch, in the order of training: each batch has at most `train.batch_size`
        samples of one bucket. For `DataLoader(batch_sampler=...)`."""
        order = self._corpus.order
        return [self._indices(draws) for draws in order.batches(order.epoch_begin(epoch), order.epoch_begin(epoch + 1))]

    @staticmethod
    def collate(samples: Sequence[DatasetSample]) -> DatasetSample:
        """Stack the tensors of samples of one bucket, and list their other values. For `DataLoader(collate_fn=...)`."""
        layouts = [
            {name: tuple(value.shape) for name, value in sample.items() if isinstance(value, torch.Tensor)}
            for sample in samples
        ]
        different = next((layout for layout in layouts if layout != layouts[0]), None)
        if different is not None:
            remedy = "use DataLoader(batch_sampler=dataset.batches()), or batches of one sample"
            raise SourceError(f"samples of different buckets cannot be stacked: {layouts[0]} and {different}; {remedy}")
        columns = {name: [sample[name] for sample in samples] for name in samples[0]}
        return {name: torch.stack(column) if name in layouts[0] else column for name, column in columns.items()}

    def close(self) -> None:
        """Release the arenas. Tensors stay valid; the dataset cannot be read any more."""
        self._resources.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """For spawned workers: they receive the names of the arenas, not their content."""
        names = [arena_name(dataset.samples.id, dataset.samples.fingerprint) for dataset in self._corpus.datasets]
        return _attach, (self._config, names, self.epoch)

    def _indices(self, draws: SampleDraws) -> list[int]:
        groups = self._corpus.order.groups
        return [
            int(self._group_offsets[group] + np.searchsorted(groups[group].sample_indices, sample))
            for group, sample in zip(draws.group.tolist(), draws.sample.tolist(), strict=True)
        ]


def _attach(config: RunConfig, arenas: Sequence[str], epoch: int) -> ArenaDataset:
    """The dataset over arenas that another process has staged and keeps open."""
    with ExitStack() as stack:
        homes = {settings.id: ArenaHome(dataset_home_path(settings, config)) for settings in config.datasets}
        datasets = [
            (settings, stack.enter_context(StagedDataset.open(homes[settings.id], arena)))
            for settings, arena in zip(config.datasets, arenas, strict=True)
        ]
        dataset = ArenaDataset(config, build_staged_corpus(config, datasets, homes), stack.pop_all())
    dataset.epoch = epoch
    return dataset
