"""Encoded samples and captions for training: what is missing is made, then each batch finds its entries by number."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from supertuner.arena.node_peers import NO_PEERS, NodePeers
from supertuner.cache.entries import MISSING_REF, CacheEntries, EntryRefs, NamedTensors
from supertuner.cache.epoch_rotation import EpochRotation
from supertuner.config.settings.run_config import RunConfig
from supertuner.core.events import Progress, Sink
from supertuner.core.host import HostFacts
from supertuner.data.batching.framing import framing_for_sample
from supertuner.data.cache_policy import CacheMode
from supertuner.data.corpus import Corpus
from supertuner.data.ordering.micro_batches import MicroBatch
from supertuner.data.ordering.sample_order import SampleDraws
from supertuner.train.encoding.cache_plan import CACHE_KINDS, CacheRequirements
from supertuner.train.encoding.corpus_caches import open_corpus_caches
from supertuner.train.encoding.encoders import (
    EncodingSpec,
    LazyDecoderPool,
    LazyEncoders,
    broken_media_as_cache_error,
    load_reference_for,
)
from supertuner.train.encoding.entry_tables import EntryTables
from supertuner.train.encoding.epochs import EpochCaches
from supertuner.train.encoding.text_inputs import text_inputs_for

BatchPiece: TypeAlias = tuple[NDArray[np.intp], NamedTensors]
"""Rows of a batch, and what belongs there."""


class EncodedCorpus:
    """Where batches get their latents and texts from. May be called from one thread at a time, any thread.

    What comes out is a function of the micro-batch: not of what is cached where, nor of how fast anything was made.
    """

    def __init__(
        self,
        requirements: CacheRequirements,
        tables: EntryTables,
        media: CacheEntries,
        text: CacheEntries,
        epoch_rotation: EpochRotation[EpochCaches] | None,
        decoders: LazyDecoderPool,
        encoders: LazyEncoders,
    ) -> None:
        self._requirements, self._corpus = requirements, requirements.corpus
        self._media, self._text, self._epoch_rotation = media, text, epoch_rotation
        self._media_table, self._caption_tables, self._text_refs = tables.media, tables.captions, tables.text_refs
        self._is_group_cached = np.array(
            [self._media_table.is_cached(group) for group in range(len(requirements.corpus.order.groups))]
        )
        self._decoders, self._encoders = decoders, encoders
        self._epoch_lock = threading.Lock()

    def latents(self, micro_batch: MicroBatch) -> NamedTensors:
        """The fields of the micro-batch's samples, in its order: contiguous CPU tensors [B, …] of its own."""
        draws = micro_batch.draws
        if self._is_group_cached[draws.group].all() and (refs := self._refs(draws)).min() >= 0:
            return self._media.gather(refs)
        pieces = []
        for mode in CacheMode:
            rows = np.flatnonzero([self._group_cache_mode(int(group)) is mode for group in draws.group])
            if len(rows):
                pieces += self._pieces(mode, micro_batch, rows)
        return _assemble(pieces, len(draws))

    def texts(self, micro_batch: MicroBatch) -> list[NamedTensors]:
        """For each sample its caption's fields, without padding: views, to be read and not written."""
        draws, order = micro_batch.draws, self._corpus.order
        texts = []
        for row, (group, sample, cycle) in enumerate(
            zip(draws.group.tolist(), draws.sample.tolist(), draws.cycle.tolist(), strict=True)
        ):
            table = self._caption_tables[order.groups[group].dataset_index]
            number = None if table is None else table.text_index(self._corpus.seed, sample, cycle)
            if number is not None:
                texts.append(self._text.entry(int(self._text_refs[number])))
            else:
                texts.append(self._uncached_text(draws.take(slice(row, row + 1))))
        return texts

    def framing(self, micro_batch: MicroBatch) -> torch.Tensor:
        """For each sample how `latents` show it: a row of `Framing` in fp32."""
        draws, corpus = micro_batch.draws, self._corpus
        rows = []
        for group, sample, cycle in zip(
            draws.group.tolist(), draws.sample.tolist(), self.cycles(micro_batch), strict=True
        ):
            dataset = corpus.datasets[corpus.order.groups[group].dataset_index]
            rows.append(framing_for_sample(corpus.seed, dataset, sample, cycle, micro_batch.bucket))
        return torch.tensor(rows, dtype=torch.float32)

    def cycles(self, micro_batch: MicroBatch) -> list[int]:
        """For each sample the turn whose changes `latents` show: of cached ones only some turns are kept."""
        cycles = []
        for group, cycle in zip(micro_batch.draws.group.tolist(), micro_batch.draws.cycle.tolist(), strict=True):
            policy = self._requirements.policies[self._corpus.order.groups[group].dataset_index]
            cycles.append(cycle % policy.media_variations if policy.media_mode is CacheMode.CACHED else cycle)
        return cycles

    def _group_cache_mode(self, group: int) -> CacheMode:
        return self._requirements.policies[self._corpus.order.groups[group].dataset_index].media_mode

    def _refs(self, draws: SampleDraws) -> EntryRefs:
        if (draws.group == draws.group[0]).all():  # as nearly always: one dataset's samples of one bucket
            return self._media_table.find(int(draws.group[0]), draws.sample, draws.cycle)
        refs = np.full(len(draws), MISSING_REF, np.int64)
        for group in np.unique(draws.group).tolist():
            rows = draws.group == group
            refs[rows] = self._media_table.find(group, draws.sample[rows], draws.cycle[rows])
        return refs

    def _pieces(self, mode: CacheMode, micro_batch: MicroBatch, rows: NDArray[np.intp]) -> list[BatchPiece]:
        draws = micro_batch.draws.take(rows)
        if mode is CacheMode.CACHED:
            return self._entry_pieces(self._media, self._refs(draws), micro_batch, rows)
        if mode is CacheMode.ON_THE_FLY:
            return [(rows, self._encode(MicroBatch(micro_batch.bucket, draws)))]
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
        return [
            (rows, self._encode(MicroBatch(micro_batch.bucket, draws)))
        ]  # the epoch was over: the same entries once more

    def _entry_pieces(
        self, entries: CacheEntries, refs: EntryRefs, micro_batch: MicroBatch, rows: NDArray[np.intp]
    ) -> list[BatchPiece]:
        """Rows from their entries; one that nobody foresaw (beyond `until`) is encoded here, to the same bits."""
        present, absent = np.flatnonzero(refs >= 0), np.flatnonzero(refs < 0)
        pieces: list[BatchPiece] = [(rows[present], entries.gather(refs[present]))] if len(present) else []
        if len(absent):
            remaining = MicroBatch(micro_batch.bucket, micro_batch.draws.take(rows[absent]))
            pieces.append((rows[absent], self._encode(remaining)))
        return pieces

    def _uncached_text(self, draws: SampleDraws) -> NamedTensors:
        dataset = self._corpus.order.groups[int(draws.group[0])].dataset_index
        if self._requirements.policies[dataset].text_mode is CacheMode.EACH_EPOCH:
            with self._epoch_lock:
                epoch_caches = self._epoch_caches(int(draws.epoch[0]), draws)
                if epoch_caches is not None and epoch_caches.text is not None:
                    entries, refs = epoch_caches.text.find(draws.position)
                    if refs[0] >= 0:
                        return {name: tensor.clone() for name, tensor in entries.entry(int(refs[0])).items()}
        return self._encoders.encode_text(text_inputs_for(self._corpus, draws)[0])

    def _epoch_caches(self, epoch: int, draws: SampleDraws) -> EpochCaches | None:
        """An epoch's own entries. Once half of the next epoch has been asked for, an epoch is over: a window that lies
        across their border was served long before."""
        assert self._epoch_rotation is not None, "nothing is made anew for each epoch"
        order, first = self._corpus.order, int(draws.position.min())
        current_epoch = int(draws.epoch.min())
        if first >= order.epoch_begin(current_epoch) + order.epoch_length(current_epoch) // 2:
            self._epoch_rotation.release_through(current_epoch - 1)
        return self._epoch_rotation.get_epoch(epoch)

    def _encode(self, micro_batch: MicroBatch) -> NamedTensors:
        with broken_media_as_cache_error():
            batch = self._decoders().decode(micro_batch)
            references = [load_reference_for(self._corpus, batch, row) for row in range(len(batch))]
        rows = [self._encoders.encode_media(*pair) for pair in zip(batch.media, references, strict=True)]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


@contextmanager
def open_encoded_corpus(
    config: RunConfig,
    corpus: Corpus,
    encoding: EncodingSpec,
    *,
    run_folder: Path,
    host: HostFacts,
    sink: Sink,
    progress: Progress,
    begin: int = 0,
    until: int | None = None,
    on_attach: Callable[[int, int], None] | None = None,
    peers: NodePeers = NO_PEERS,
) -> Iterator[EncodedCorpus]:
    """Encode what is not cached yet and serve batches; leaving ends what should not outlast the run.

    `begin` is the position that training starts or goes on from, `until` where it ends: samples that are never drawn
    are not encoded. The `peers` of a node encode together, each sample once; processes of other runs wait for them.
    Encoders are gone when this yields, unless a dataset needs them on the way. `attached` is told what unified memory
    comes into use.
    """
    with ExitStack() as stack:
        caches = stack.enter_context(
            open_corpus_caches(
                config,
                corpus,
                encoding,
                run_folder=run_folder,
                host=host,
                sink=sink,
                progress=progress,
                until=until,
                on_attach=on_attach,
                peers=peers,
            )
        )
        stores = []
        for kind in CACHE_KINDS:
            stores.append(store := caches.open(kind))
            if store is not None:
                stack.callback(store.close)
        media, text = (CacheEntries() if store is None else store.entries for store in stores)
        tables, tables_reader = caches.build_tables(*stores)
        if tables_reader is not None:
            stack.callback(tables_reader.close)
        caches = caches.without_plan()
        if any(caches.requirements.uses_mode("latents", mode) for mode in (CacheMode.EACH_EPOCH, CacheMode.ON_THE_FLY)):
            caches.decoders()  # its threads are started by this one, not in the middle of a batch
        epochs = caches.open_epoch_rotation(begin, until)
        if epochs is not None:
            stack.callback(epochs.close)
        yield EncodedCorpus(caches.requirements, tables, media, text, epochs, caches.decoders, caches.encoders)


def _assemble(pieces: list[BatchPiece], count: int) -> NamedTensors:
    """Pieces of a batch at their rows."""
    if len(pieces) == 1:
        return pieces[0][1]
    batch = {name: torch.empty((count, *tensor.shape[1:]), dtype=tensor.dtype) for name, tensor in pieces[0][1].items()}
    for rows, piece in pieces:
        for name, one in piece.items():
            batch[name][torch.from_numpy(rows)] = one
    return batch
