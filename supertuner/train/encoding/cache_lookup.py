"""EncodedCorpus: looks up the cached latents and text encodings of a micro-batch, and encodes what is not cached.

Lookup is by arrays: a sample's index and its cycle (how often its dataset was passed through before) give a ref
(LatentTable, CaptionTable), and CacheEntries gathers the entries of the refs. `cache/` stores the entries.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from supertuner.cache.entries import MISSING_REF, CacheEntries, EntryRefs, NamedTensors
from supertuner.cache.epoch_rotation import EpochRotation
from supertuner.data.batching.render import framing_for_sample
from supertuner.data.cache_policy import CacheMode, DatasetCachePolicy
from supertuner.data.corpus import Corpus
from supertuner.data.ordering.micro_batches import MicroBatch
from supertuner.data.ordering.sample_order import SampleDraws
from supertuner.train.encoding.cache_plan import CachePlan, CacheRequirements, CaptionTable
from supertuner.train.encoding.encoders import LazyEncoders, text_inputs_for
from supertuner.train.encoding.epochs import EpochCaches

BatchPiece: TypeAlias = tuple[NDArray[np.intp], NamedTensors]
"""Row indices of a batch, and the tensors of these rows."""


class LatentTable:
    """Finds the refs of cached latents from group, sample and cycle by array lookup, without hashing."""

    def __init__(
        self, corpus: Corpus, job_offsets: Sequence[int | None], variations: Sequence[int], refs: EntryRefs
    ) -> None:
        """`refs` has one element per variation and sample of each group (samples of one dataset in one bucket), in the
        order of the MediaPlan; `job_offsets` are where each group begins, and `variations` how many it has."""
        self._sample_indices, self._variations = [group.sample_indices for group in corpus.order.groups], variations
        self._refs = [
            None if begin is None else refs[begin : begin + count * len(samples)].reshape(count, len(samples))
            for begin, count, samples in zip(job_offsets, variations, self._sample_indices, strict=True)
        ]
        self.is_cached = np.array([refs is not None for refs in self._refs])
        """For each group, whether the plan caches its latents."""

    def find(self, group: int, samples: NDArray[np.int64], cycles: NDArray[np.int64]) -> EntryRefs:
        """The refs of samples of this group; MISSING_REF for those that the plan did not include."""
        table = self._refs[group]
        assert table is not None, f"group {group} is not cached"
        columns = np.searchsorted(self._sample_indices[group], samples.astype(np.uint32))
        refs: EntryRefs = table[cycles % self._variations[group], columns]
        return refs


@dataclass(frozen=True, eq=False, slots=True)
class EntryTables:
    """The lookup tables of entries that are encoded once for the whole run (not again in each epoch)."""

    latents: LatentTable
    captions: tuple[CaptionTable | None, ...]
    """For each dataset; None if its captions are not encoded once for the whole run."""
    text_refs: EntryRefs
    """By the indices that CaptionTable gives."""

    @classmethod
    def build(cls, corpus: Corpus, plan: CachePlan, media: CacheEntries, text: CacheEntries) -> EntryTables:
        table = LatentTable(corpus, plan.media.job_offsets, plan.media.variations, media.find(plan.media.keys))
        return cls(table, plan.text.tables, text.find(plan.text_keys))


class EncodedCorpus:
    """Gives batches their latents and texts. May be called from any thread, but from one at a time.

    The result depends on the micro-batch only: not on what is cached where, nor on when it was encoded.
    """

    def __init__(
        self,
        requirements: CacheRequirements,
        tables: EntryTables,
        media: CacheEntries,
        text: CacheEntries,
        epoch_rotation: EpochRotation[EpochCaches] | None,
        encoders: LazyEncoders,
    ) -> None:
        self._policies, self._corpus = requirements.policies, requirements.corpus
        self._tables, self._media, self._text = tables, media, text
        self._epoch_rotation, self._encoders = epoch_rotation, encoders
        self._epoch_lock = threading.Lock()

    def latents(self, micro_batch: MicroBatch) -> NamedTensors:
        """The encoded media of the micro-batch's samples, in its order: new contiguous CPU tensors [B, …]."""
        draws = micro_batch.draws
        if self._tables.latents.is_cached[draws.group].all() and (refs := self._find_latents(draws)).min() >= 0:
            return self._media.gather(refs)
        pieces = []
        for mode in CacheMode:
            rows = np.flatnonzero([self._policy(int(group)).media_mode is mode for group in draws.group])
            if len(rows):
                pieces += self._pieces(mode, micro_batch, rows)
        return _assemble(pieces, len(draws))

    def texts(self, micro_batch: MicroBatch) -> list[NamedTensors]:
        """For each sample its encoded caption, without padding. The tensors may be views and must not be written."""
        draws, order = micro_batch.draws, self._corpus.order
        texts = []
        for row in range(len(draws)):
            table = self._tables.captions[order.groups[int(draws.group[row])].dataset_index]
            sample, cycle = int(draws.sample[row]), int(draws.cycle[row])
            text_index = None if table is None else table.text_index(self._corpus.seed, sample, cycle)
            if text_index is not None:
                texts.append(self._text.entry(int(self._tables.text_refs[text_index])))
            else:
                texts.append(self._uncached_text(draws.take(slice(row, row + 1))))
        return texts

    def framing(self, micro_batch: MicroBatch) -> torch.Tensor:
        """For each sample how `latents` shows it: an ImageFraming as a row of fp32."""
        draws, corpus = micro_batch.draws, self._corpus
        columns = zip(draws.group.tolist(), draws.sample.tolist(), self.cycles(micro_batch), strict=True)
        rows = [
            framing_for_sample(corpus.seed, corpus.dataset_of_group(group), sample, cycle, micro_batch.bucket)
            for group, sample, cycle in columns
        ]
        return torch.tensor(rows, dtype=torch.float32)

    def cycles(self, micro_batch: MicroBatch) -> list[int]:
        """For each sample the cycle whose augmentation `latents` shows; only some cycles of cached samples are kept."""
        cycles = []
        for group, cycle in zip(micro_batch.draws.group.tolist(), micro_batch.draws.cycle.tolist(), strict=True):
            policy = self._policy(group)
            cycles.append(cycle % policy.media_variations if policy.media_mode is CacheMode.CACHED else cycle)
        return cycles

    def _policy(self, group: int) -> DatasetCachePolicy:
        return self._policies[self._corpus.order.groups[group].dataset_index]

    def _find_latents(self, draws: SampleDraws) -> EntryRefs:
        if (draws.group == draws.group[0]).all():  # the usual case: one dataset's samples of one bucket
            return self._tables.latents.find(int(draws.group[0]), draws.sample, draws.cycle)
        refs = np.full(len(draws), MISSING_REF, np.int64)
        for group in np.unique(draws.group).tolist():
            rows = draws.group == group
            refs[rows] = self._tables.latents.find(group, draws.sample[rows], draws.cycle[rows])
        return refs

    def _pieces(self, mode: CacheMode, micro_batch: MicroBatch, rows: NDArray[np.intp]) -> list[BatchPiece]:
        """The latents of `rows`, all of whose datasets have this cache mode."""
        draws = micro_batch.draws.take(rows)
        if mode is CacheMode.CACHED:
            shown = replace(micro_batch.draws, cycle=np.array(self.cycles(micro_batch), np.int64))
            shown_batch = MicroBatch(micro_batch.bucket, shown)
            return self._entry_pieces(self._media, self._find_latents(draws), shown_batch, rows)
        if mode is CacheMode.ON_THE_FLY:
            return [self._encode_piece(micro_batch, rows)]
        pieces = []
        for epoch in np.unique(draws.epoch).tolist():
            pieces += self._epoch_pieces(epoch, micro_batch, rows[draws.epoch == epoch])
        return pieces

    def _epoch_pieces(self, epoch: int, micro_batch: MicroBatch, rows: NDArray[np.intp]) -> list[BatchPiece]:
        draws = micro_batch.draws.take(rows)
        with self._epoch_lock:
            epoch_caches = self._epoch_caches(epoch, draws)
            if epoch_caches is not None and epoch_caches.media is not None:
                return self._entry_pieces(*epoch_caches.media.find(draws.position), micro_batch, rows)
        return [self._encode_piece(micro_batch, rows)]  # the epoch's entries were released already

    def _entry_pieces(
        self, entries: CacheEntries, refs: EntryRefs, micro_batch: MicroBatch, rows: NDArray[np.intp]
    ) -> list[BatchPiece]:
        """Rows from their entries. Missing ones (not planned: beyond the end of the run) are encoded here."""
        present, absent = np.flatnonzero(refs >= 0), np.flatnonzero(refs < 0)
        pieces: list[BatchPiece] = [(rows[present], entries.gather(refs[present]))] if len(present) else []
        if len(absent):
            pieces.append(self._encode_piece(micro_batch, rows[absent]))
        return pieces

    def _encode_piece(self, micro_batch: MicroBatch, rows: NDArray[np.intp]) -> BatchPiece:
        return rows, self._encoders.encode_batch(MicroBatch(micro_batch.bucket, micro_batch.draws.take(rows)))

    def _uncached_text(self, draws: SampleDraws) -> NamedTensors:
        policy = self._policy(int(draws.group[0]))
        if policy.text_mode is CacheMode.EACH_EPOCH:
            with self._epoch_lock:
                epoch_caches = self._epoch_caches(int(draws.epoch[0]), draws)
                if epoch_caches is not None and epoch_caches.text is not None:
                    entries, refs = epoch_caches.text.find(draws.position)
                    if refs[0] >= 0:
                        return {name: tensor.clone() for name, tensor in entries.entry(int(refs[0])).items()}
        variations = policy.text_variations if policy.text_mode is CacheMode.CACHED else None
        return self._encoders.encode_text(text_inputs_for(self._corpus, draws, variations)[0])

    def _epoch_caches(self, epoch: int, draws: SampleDraws) -> EpochCaches | None:
        """An epoch's own entries; None if they were released.

        An epoch is released once half of the next epoch has been requested: by then, every window that spans the border
        between the two has been served.
        """
        assert self._epoch_rotation is not None, "no dataset refreshes its cache each epoch"
        order, first = self._corpus.order, int(draws.position.min())
        current_epoch = int(draws.epoch.min())
        if first >= order.epoch_begin(current_epoch) + order.epoch_length(current_epoch) // 2:
            self._epoch_rotation.release_through(current_epoch - 1)
        return self._epoch_rotation.get_epoch(epoch)


def _assemble(pieces: list[BatchPiece], count: int) -> NamedTensors:
    """Put the pieces of a batch at their rows."""
    if len(pieces) == 1:
        return pieces[0][1]
    batch = {name: torch.empty((count, *tensor.shape[1:]), dtype=tensor.dtype) for name, tensor in pieces[0][1].items()}
    for rows, piece in pieces:
        for name, tensor in piece.items():
            batch[name][torch.from_numpy(rows)] = tensor
    return batch
