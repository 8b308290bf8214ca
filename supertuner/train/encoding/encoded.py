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

from supertuner.arena.peers import ALONE, Peers
from supertuner.cache.entries import MISSING, Entries, Refs, Tensors
from supertuner.cache.epoch_rotation import Rotation
from supertuner.config.settings.tree import RunConfig
from supertuner.core.events import Progress, Sink
from supertuner.core.host import Host
from supertuner.data.batching.framing import framing_of
from supertuner.data.cache_policy import How
from supertuner.data.corpus import Corpus
from supertuner.data.ordering.order import Draws
from supertuner.data.ordering.windows import MicroBatch
from supertuner.train.encoding.cache_plan import KINDS, Needs
from supertuner.train.encoding.encoders import Encoders, Encoding, LazyDecoders, broken_at_caching, original_of
from supertuner.train.encoding.epochs import Epoch
from supertuner.train.encoding.stores import open_caching
from supertuner.train.encoding.tables import Tables
from supertuner.train.encoding.text_inputs import told_of

Piece: TypeAlias = tuple[NDArray[np.intp], Tensors]
"""Rows of a batch, and what belongs there."""


class Encoded:
    """Where batches get their latents and texts from. May be called from one thread at a time, any thread.

    What comes out is a function of the micro-batch: not of what is cached where, nor of how fast anything was made.
    """

    def __init__(
        self,
        needs: Needs,
        tables: Tables,
        media: Entries,
        text: Entries,
        epochs: Rotation[Epoch] | None,
        decoders: LazyDecoders,
        encoders: Encoders,
    ) -> None:
        self._needs, self._corpus = needs, needs.corpus
        self._media, self._text, self._epochs = media, text, epochs
        self._table, self._captions, self._text_refs = tables.media, tables.captions, tables.text_refs
        self._cached = np.array([self._table.holds(group) for group in range(len(needs.corpus.order.groups))])
        self._decoders, self._encoders = decoders, encoders
        self._guard = threading.Lock()

    def latents(self, micro: MicroBatch) -> Tensors:
        """The fields of the micro-batch's samples, in its order: contiguous CPU tensors [B, …] of its own."""
        draws = micro.draws
        if self._cached[draws.group].all() and (refs := self._refs(draws)).min() >= 0:
            return self._media.gather(refs)
        pieces = []
        for how in How:
            rows = np.flatnonzero([self._how(int(group)) is how for group in draws.group])
            if len(rows):
                pieces += self._pieces(how, micro, rows)
        return _assembled(pieces, len(draws))

    def texts(self, micro: MicroBatch) -> list[Tensors]:
        """For each sample its caption's fields, without padding: views, to be read and not written."""
        draws, order = micro.draws, self._corpus.order
        found = []
        for row, (group, sample, turn) in enumerate(
            zip(draws.group.tolist(), draws.sample.tolist(), draws.cycle.tolist(), strict=True)
        ):
            table = self._captions[order.groups[group].dataset]
            number = None if table is None else table.text(self._corpus.seed, sample, turn)
            if number is not None:
                found.append(self._text.entry(int(self._text_refs[number])))
            else:
                found.append(self._fresh_text(draws.take(slice(row, row + 1))))
        return found

    def framing(self, micro: MicroBatch) -> torch.Tensor:
        """For each sample how `latents` show it: a row of `Framing` in fp32."""
        draws, corpus = micro.draws, self._corpus
        rows = []
        for group, sample, turn in zip(draws.group.tolist(), draws.sample.tolist(), self.turns(micro), strict=True):
            part = corpus.parts[corpus.order.groups[group].dataset]
            rows.append(framing_of(corpus.seed, part, sample, turn, micro.bucket))
        return torch.tensor(rows, dtype=torch.float32)

    def turns(self, micro: MicroBatch) -> list[int]:
        """For each sample the turn whose changes `latents` show: of cached ones only some turns are kept."""
        found = []
        for group, turn in zip(micro.draws.group.tolist(), micro.draws.cycle.tolist(), strict=True):
            treatment = self._needs.treatments[self._corpus.order.groups[group].dataset]
            found.append(turn % treatment.media_turns if treatment.media is How.CACHED else turn)
        return found

    def _how(self, group: int) -> How:
        return self._needs.treatments[self._corpus.order.groups[group].dataset].media

    def _refs(self, draws: Draws) -> Refs:
        if (draws.group == draws.group[0]).all():  # as nearly always: one dataset's samples of one bucket
            return self._table.find(int(draws.group[0]), draws.sample, draws.cycle)
        refs = np.full(len(draws), MISSING, np.int64)
        for group in np.unique(draws.group).tolist():
            rows = draws.group == group
            refs[rows] = self._table.find(group, draws.sample[rows], draws.cycle[rows])
        return refs

    def _pieces(self, how: How, micro: MicroBatch, rows: NDArray[np.intp]) -> list[Piece]:
        draws = micro.draws.take(rows)
        if how is How.CACHED:
            return self._found(self._media, self._refs(draws), micro, rows)
        if how is How.AT_USE:
            return [(rows, self._encode(MicroBatch(micro.bucket, draws)))]
        pieces = []
        for epoch in np.unique(draws.epoch).tolist():
            pieces += self._of_epoch(epoch, micro, rows[draws.epoch == epoch])
        return pieces

    def _of_epoch(self, epoch: int, micro: MicroBatch, rows: NDArray[np.intp]) -> list[Piece]:
        draws = micro.draws.take(rows)
        with self._guard:
            own = self._epoch(epoch, draws)
            if own is not None and own.media is not None:
                return self._found(*own.media.at(draws.position), micro, rows)
        return [(rows, self._encode(MicroBatch(micro.bucket, draws)))]  # the epoch was over: the same entries once more

    def _found(self, entries: Entries, refs: Refs, micro: MicroBatch, rows: NDArray[np.intp]) -> list[Piece]:
        """Rows from their entries; one that nobody foresaw (beyond `until`) is encoded here, to the same bits."""
        there, absent = np.flatnonzero(refs >= 0), np.flatnonzero(refs < 0)
        pieces: list[Piece] = [(rows[there], entries.gather(refs[there]))] if len(there) else []
        if len(absent):
            left = MicroBatch(micro.bucket, micro.draws.take(rows[absent]))
            pieces.append((rows[absent], self._encode(left)))
        return pieces

    def _fresh_text(self, draws: Draws) -> Tensors:
        dataset = self._corpus.order.groups[int(draws.group[0])].dataset
        if self._needs.treatments[dataset].text is How.EACH_EPOCH:
            with self._guard:
                own = self._epoch(int(draws.epoch[0]), draws)
                if own is not None and own.text is not None:
                    entries, refs = own.text.at(draws.position)
                    if refs[0] >= 0:
                        return {name: one.clone() for name, one in entries.entry(int(refs[0])).items()}
        return self._encoders.text(told_of(self._corpus, draws)[0])

    def _epoch(self, epoch: int, draws: Draws) -> Epoch | None:
        """An epoch's own entries. Once half of the next epoch has been asked for, an epoch is over: a window that lies
        across their border was served long before."""
        assert self._epochs is not None, "nothing is made anew for each epoch"
        order, first = self._corpus.order, int(draws.position.min())
        now = int(draws.epoch.min())
        if first >= order.epoch_begin(now) + order.epoch_length(now) // 2:
            self._epochs.over(now - 1)
        return self._epochs.at(epoch)

    def _encode(self, micro: MicroBatch) -> Tensors:
        with broken_at_caching():
            batch = self._decoders().make(micro)
            originals = [original_of(self._corpus, batch, row) for row in range(len(batch))]
        rows = [self._encoders.media(*both) for both in zip(batch.media, originals, strict=True)]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


@contextmanager
def open_encoded(
    config: RunConfig,
    corpus: Corpus,
    encoding: Encoding,
    *,
    run_folder: Path,
    host: Host,
    sink: Sink,
    progress: Progress,
    begin: int = 0,
    until: int | None = None,
    attached: Callable[[int, int], None] | None = None,
    peers: Peers = ALONE,
) -> Iterator[Encoded]:
    """Encode what is not cached yet and serve batches; leaving ends what should not outlast the run.

    `begin` is the position that training starts or goes on from, `until` where it ends: samples that are never drawn
    are not encoded. The `peers` of a node encode together, each sample once; processes of other runs wait for them.
    Encoders are gone when this yields, unless a dataset needs them on the way. `attached` is told what unified memory
    comes into use.
    """
    with ExitStack() as opened:
        caching = opened.enter_context(
            open_caching(
                config,
                corpus,
                encoding,
                run_folder=run_folder,
                host=host,
                sink=sink,
                progress=progress,
                until=until,
                attached=attached,
                peers=peers,
            )
        )
        stores = []
        for what in KINDS:
            stores.append(store := caching.open(what))
            if store is not None:
                opened.callback(store.close)
        media, text = (Entries() if store is None else store.entries for store in stores)
        tables, held = caching.tables(*stores)
        if held is not None:
            opened.callback(held.close)
        caching = caching.without_plan()
        if any(caching.needs.any_is("latents", how) for how in (How.EACH_EPOCH, How.AT_USE)):
            caching.decoders()  # its threads are started by this one, not in the middle of a batch
        epochs = caching.epochs(begin, until)
        if epochs is not None:
            opened.callback(epochs.close)
        yield Encoded(caching.needs, tables, media, text, epochs, caching.decoders, caching.encoders)


def _assembled(pieces: list[Piece], count: int) -> Tensors:
    """Pieces of a batch at their rows."""
    if len(pieces) == 1:
        return pieces[0][1]
    batch = {name: torch.empty((count, *one.shape[1:]), dtype=one.dtype) for name, one in pieces[0][1].items()}
    for rows, piece in pieces:
        for name, one in piece.items():
            batch[name][torch.from_numpy(rows)] = one
    return batch
