"""Surveys a folder of samples for `supertuner init`: kind, number, sizes, lengths, captions. Nothing is written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import median

from supertuner.config.settings.data import DatasetSettings
from supertuner.core.errors import BrokenMediaError, SourceError
from supertuner.core.types import MediaKind
from supertuner.data.batching.captions import apply_trigger_word
from supertuner.data.probe.media_info import MediaInfo
from supertuner.data.sources import open_source
from supertuner.data.sources.listing import FileSpan, SkippedFile, SourceItem, SourceListing
from supertuner.data.staging.span_reader import read_captions
from supertuner.plan.forecast.survey import probe_some

DATASET_ID = "0"
"""Messages about the folder name `datasets[0]`, as in the file."""
PROMPTS = 3
"""Captions that become validation prompts."""
CAPTIONS_READ = 24
"""Captions that are read at most to find different ones."""
PROMPT_CHARACTERS = 300
SHORT_CLIP_SHARE = 0.1
"""Share of clips that may be shorter than the chosen length; they are not used."""


@dataclass(frozen=True, slots=True)
class FolderSurvey:
    """What a folder holds."""

    folder: Path
    kind: MediaKind
    files: int
    usable: int
    """Files without the broken ones, as far as the files that were read tell."""
    captioned: int
    """Files with a caption that is not empty."""
    prompts: tuple[str, ...]
    """Some captions, different and in one line."""
    facts: tuple[MediaInfo, ...]
    """The sizes of the files that were read."""
    broken: tuple[SkippedFile, ...]
    """Files that were read or listed, and are broken."""
    notes: tuple[str, ...]
    """Files that are not used, and why."""

    @property
    def median_side(self) -> int:
        """The median of the sides of squares with the files' areas, in pixels."""
        return round(median(sqrt(one.width * one.height) for one in self.facts))

    def clip_frames(self, fps: float) -> int:
        """Frames at this rate that nearly all clips have."""
        lengths = sorted(int(one.seconds * fps) if one.seconds else one.frames for one in self.facts)
        return lengths[int(len(lengths) * SHORT_CLIP_SHARE)]


def survey_folder(folder: Path, kinds: Sequence[MediaKind], trigger_word: str | None) -> FolderSurvey:
    """The survey of the kind, of `kinds`, with the most files.

    Raises SourceError if the folder is missing, or has no readable file of these kinds.
    """
    folder = Path(os.path.abspath(folder.expanduser()))
    if not folder.exists():
        raise SourceError(f"--data {folder}: there is no such folder; name the folder with your samples")
    listings = _list_kinds(folder, kinds)
    dataset, listing = max(listings, key=lambda pair: len(pair[1].items))
    if not listing.items:
        notes = "; ".join(dict.fromkeys(note for _, one in listings for note in one.notes)) or "it is empty"
        raise SourceError(f"--data {folder}: holds no {' or '.join(kinds)} that can be read ({notes})")
    facts, broken = probe_some(dataset, open_source(dataset), listing.items)
    if not facts:
        first = f"{broken[0].file}: {broken[0].reason}"
        raise SourceError(f"--data {folder}: all {len(broken)} files that were read are broken; the first is {first}")
    captioned = sum(_has_caption(item) for item in listing.items)
    prompts = _find_prompts(dataset, listing, trigger_word)
    return FolderSurvey(
        folder=folder,
        kind=dataset.dataset_type,
        files=len(listing.items),
        usable=max(1, round(len(listing.items) * len(facts) / (len(facts) + len(broken)))),
        captioned=captioned,
        prompts=prompts,
        facts=tuple(facts),
        broken=(*broken, *listing.skipped),
        notes=listing.notes,
    )


def _list_kinds(folder: Path, kinds: Sequence[MediaKind]) -> list[tuple[DatasetSettings, SourceListing]]:
    """The listing of each kind. A table may have columns for one kind only: the others then cannot be listed."""
    listings: list[tuple[DatasetSettings, SourceListing]] = []
    problems: list[SourceError] = []
    for kind in kinds:
        dataset = DatasetSettings(id=DATASET_ID, dataset_type=kind, instance_data_dir=folder)
        try:
            listings.append((dataset, open_source(dataset).list_items()))
        except SourceError as error:
            problems.append(error)
    if not listings:
        raise problems[0]
    return listings


def _has_caption(item: SourceItem) -> bool:
    return item.caption.nbytes > 0 if isinstance(item.caption, FileSpan) else any(item.caption or ())


def _find_prompts(dataset: DatasetSettings, listing: SourceListing, trigger_word: str | None) -> tuple[str, ...]:
    """Different captions, spread over the folder, with the trigger word as training adds it."""
    items = [item for item in listing.items if _has_caption(item)]
    prompts: dict[str, None] = {}
    for item in items[:: max(1, len(items) // CAPTIONS_READ)]:
        try:
            captions = read_captions(item, listing.caption_syntax, dataset.captions)
        except BrokenMediaError:
            continue  # staging reports it
        text = _one_line(apply_trigger_word(captions[0], trigger_word, ",")) if captions else ""
        if text:
            prompts[text] = None
    step = max(1, len(prompts) // PROMPTS)
    found = list(prompts)[::step][:PROMPTS]
    return tuple(found or ([trigger_word] if trigger_word else []))


def _one_line(text: str) -> str:
    """The text without line breaks and control characters, shortened at a word."""
    plain = "".join(c for c in " ".join(text.split()) if c.isprintable())
    return (
        plain
        if len(plain) <= PROMPT_CHARACTERS
        else plain[:PROMPT_CHARACTERS].rpartition(" ")[0] or plain[:PROMPT_CHARACTERS]
    )
