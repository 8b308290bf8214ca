"""Shows what the model will be trained on: a contact sheet with one decoded, augmented batch of every bucket."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from supertuner.api.session import arena_lifetime
from supertuner.arena.run_context import RunContext
from supertuner.config.sources.load import LoadedConfig
from supertuner.core.durable import write_bytes
from supertuner.core.errors import SuperTunerError
from supertuner.core.host import HostFacts
from supertuner.core.types import MediaKind
from supertuner.data.corpus import Corpus
from supertuner.data.corpus_loader import open_corpus
from supertuner.data.ordering.micro_batches import MicroBatch, single_micro_batch
from supertuner.sinks.console import ConsoleSink
from supertuner.sinks.drawing import png_bytes
from supertuner.tools.contact_sheet import ContactSheetCell, ContactSheetSection, render_contact_sheet

if TYPE_CHECKING:
    from supertuner.data.batching.decoder_pool import DecodedBatch

MAX_SAMPLES_PER_BUCKET = 8
"""Samples of a batch that are shown."""

MAX_BUCKETS = 48
"""Buckets that are shown: those with the most samples."""


def first_batch_per_bucket(corpus: Corpus, epoch: int) -> list[MicroBatch]:
    """The first batch of every dataset and bucket in the epoch, in training order."""
    order = corpus.order
    layout = order.epoch_layout(epoch)
    first_batches = []
    for group in range(len(order.groups)):
        if layout.chunk_begin[group + 1] == layout.chunk_begin[group]:
            continue
        position = layout.begin + int(layout.position_of(np.array([group]), layout.stream_begin[[group]])[0])
        first_batches.append(single_micro_batch(order, next(order.batches(position))))
    return first_batches


def preview_dataset(loaded: LoadedConfig, out: Path, *, epoch: int = 0) -> int:
    """Stage missing data and write the contact sheet to `out`. Returns the number of buckets shown. Starts no run."""
    _require_writable(out)
    config, host = loaded.config, HostFacts()
    with ConsoleSink(set_aside_hint="`supertuner stage` lists them all") as console:
        for note in loaded.notes:
            console.emit(note)
        context = RunContext(out.parent, console, console, host)
        with open_corpus(config, context, life=arena_lifetime(config)) as corpus:
            return write_preview(corpus, out, epoch=epoch, threads=config.loader.num_workers or host.cpus())


def write_preview(corpus: Corpus, out: Path, *, epoch: int = 0, threads: int = 1) -> int:
    """Write the contact sheet of an epoch to `out` as PNG. Returns the number of buckets shown."""
    from supertuner.data.batching.decoder_pool import DecoderPool

    order = corpus.order
    batches = first_batch_per_bucket(corpus, epoch)
    largest = sorted(batches, key=lambda b: -len(order.groups[int(b.draws.group[0])].sample_indices))[:MAX_BUCKETS]
    shown = [micro for micro in batches if micro in largest]
    with DecoderPool(corpus, threads) as decoders:
        sections = [_build_section(corpus, micro, decoders.decode(_truncate_batch(micro))) for micro in shown]
    note = (
        f"seed {corpus.seed}, epoch {epoch}: {order.epoch_length(epoch)} samples in {len(order.groups)} "
        f"bucket{'s' if len(order.groups) != 1 else ''}, "
        f"batches of {order.batch_size}"
    )
    if len(shown) < len(batches):
        note += f"; the {len(shown)} largest are shown"
    write_bytes(out, png_bytes(render_contact_sheet("one batch of every bucket", note, sections)))
    return len(shown)


def _require_writable(out: Path) -> None:
    """Raise SuperTunerError if `out` cannot be written; called before the work is done."""
    if out.suffix.lower() != ".png":
        raise SuperTunerError(f"--out {out}: the contact sheet is a PNG file; choose a name that ends in .png")
    if out.is_dir() or not os.access(out.absolute().parent, os.W_OK | os.X_OK):
        raise SuperTunerError(f"--out {out}: cannot be written; name a file in an existing, writable folder")


def _truncate_batch(micro_batch: MicroBatch) -> MicroBatch:
    """The part of a batch that is shown."""
    return MicroBatch(micro_batch.bucket, micro_batch.draws.take(slice(0, MAX_SAMPLES_PER_BUCKET)))


def _build_section(corpus: Corpus, micro_batch: MicroBatch, batch: DecodedBatch) -> ContactSheetSection:
    group = corpus.order.groups[int(micro_batch.draws.group[0])]
    more = f", {len(micro_batch) - len(batch)} more in the batch" if len(micro_batch) > len(batch) else ""
    count = len(group.sample_indices)
    note = f"{group.dataset_id}: {count} sample{'s' if count != 1 else ''}{more}"
    seconds = batch.bucket.samples / batch.bucket.sample_rate if batch.bucket.kind is MediaKind.AUDIO else 0.0
    cells = [
        ContactSheetCell(media.numpy(), caption, key, seconds)
        for media, caption, key in zip(batch.media, batch.captions, batch.sample_keys, strict=True)
    ]
    return ContactSheetSection(batch.bucket.label, note, tuple(cells))
