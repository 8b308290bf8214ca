"""How a dataset's samples and captions are cached: once, in some variations, anew each epoch, or not at all. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from supertuner.config.settings.cache import CacheConfig
from supertuner.config.settings.data import Dataset
from supertuner.core.events import Warned
from supertuner.data.content import why_captions_vary, why_media_vary


class How(StrEnum):
    CACHED = "cached"
    EACH_EPOCH = "made anew for each epoch"
    AT_USE = "encoded when used"


@dataclass(frozen=True, slots=True)
class Treatment:
    """Of one dataset."""

    media: How
    text: How
    media_turns: int = 1
    """Cached: how many turns of a sample are kept; turn t uses that of t modulo this."""
    text_turns: int = 1
    """The same of shuffled tags. Which of several captions is used, and whether it is dropped, is free in each turn."""


_MODES = {"disable_cache": How.AT_USE, "static": How.CACHED, "refresh_each_epoch": How.EACH_EPOCH}


def treatment(settings: Dataset, cache: CacheConfig) -> Treatment:
    mode = _MODES[settings.augmentations_cache_mode or "static"]

    def how(cache_type: str, varies: bool) -> tuple[How, int]:
        if cache_type == "none":
            return How.AT_USE, 1
        return (mode, settings.variations) if varies else (How.CACHED, 1)

    media, media_turns = how(cache.vae_cache_type, bool(why_media_vary(settings)))
    text, text_turns = how(cache.text_cache_type, bool(why_captions_vary(settings)))
    return Treatment(media, text, media_turns, text_turns)


def doubts(datasets: Sequence[Dataset], cache: CacheConfig) -> list[Warned]:
    """What users should know of: a default that decides what is learnt, and settings without effect."""
    return [warned for settings in datasets for warned in _doubts(settings, cache)]


def _doubts(settings: Dataset, cache: CacheConfig) -> list[Warned]:
    place = f"datasets[{settings.id}]"
    cached = [
        reason
        for kind, reason in (
            (cache.vae_cache_type, why_media_vary(settings)),
            (cache.text_cache_type, why_captions_vary(settings)),
        )
        if reason and kind != "none"
    ]
    mode, count = settings.augmentations_cache_mode, settings.variations
    if mode is None and cached:
        times = "1 variation" if count == 1 else f"{count} variations"
        message = (
            f'is not set, and {", ".join(cached)} would give a new sample each turn: "static" applies, and {times} of '
            'each sample are used again and again; set "static" (with variations: N), "refresh_each_epoch", or '
            '"disable_cache"'
        )
        return [Warned(f"{place}.augmentations_cache_mode", message)]
    if mode is not None and not cached:
        return [Warned(f"{place}.augmentations_cache_mode", "has no effect: nothing cached changes from turn to turn")]
    if mode in ("disable_cache", "refresh_each_epoch") and count > 1:
        return [
            Warned(f"{place}.variations", f'has an effect only with augmentations_cache_mode "static", not "{mode}"')
        ]
    return []
