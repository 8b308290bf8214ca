"""How a dataset's samples and captions are cached: once, in some variations, anew each epoch, or not at all. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from supertuner.config.settings.cache import CacheConfig
from supertuner.config.settings.data import DatasetSettings
from supertuner.core.events import WarningEvent
from supertuner.data.content_key import varying_caption_settings, varying_media_settings


class CacheMode(StrEnum):
    CACHED = "cached"
    EACH_EPOCH = "made anew for each epoch"
    ON_THE_FLY = "encoded when used"


@dataclass(frozen=True, slots=True)
class DatasetCachePolicy:
    """Of one dataset."""

    media_mode: CacheMode
    text_mode: CacheMode
    media_variations: int = 1
    """Cached: how many turns of a sample are kept; turn t uses that of t modulo this."""
    text_variations: int = 1
    """The same of shuffled tags. Which of several captions is used, and whether it is dropped, is free in each turn."""


_MODE_BY_SETTING = {
    "disable_cache": CacheMode.ON_THE_FLY,
    "static": CacheMode.CACHED,
    "refresh_each_epoch": CacheMode.EACH_EPOCH,
}


def dataset_cache_policy(settings: DatasetSettings, cache: CacheConfig) -> DatasetCachePolicy:
    mode = _MODE_BY_SETTING[settings.augmentations_cache_mode or "static"]

    def mode_for(cache_type: str, varies: bool) -> tuple[CacheMode, int]:
        if cache_type == "none":
            return CacheMode.ON_THE_FLY, 1
        return (mode, settings.variations) if varies else (CacheMode.CACHED, 1)

    media_mode, media_variations = mode_for(cache.vae_cache_type, bool(varying_media_settings(settings)))
    text_mode, text_variations = mode_for(cache.text_cache_type, bool(varying_caption_settings(settings)))
    return DatasetCachePolicy(media_mode, text_mode, media_variations, text_variations)


def cache_policy_warnings(datasets: Sequence[DatasetSettings], cache: CacheConfig) -> list[WarningEvent]:
    """What users should know of: a default that decides what is learnt, and settings without effect."""
    return [warned for settings in datasets for warned in _dataset_warnings(settings, cache)]


def _dataset_warnings(settings: DatasetSettings, cache: CacheConfig) -> list[WarningEvent]:
    key_path = f"datasets[{settings.id}]"
    cached_variations = [
        reason
        for kind, reason in (
            (cache.vae_cache_type, varying_media_settings(settings)),
            (cache.text_cache_type, varying_caption_settings(settings)),
        )
        if reason and kind != "none"
    ]
    mode, count = settings.augmentations_cache_mode, settings.variations
    if mode is None and cached_variations:
        times = "1 variation" if count == 1 else f"{count} variations"
        message = (
            f'is not set, and {", ".join(cached_variations)} would give a new sample each turn: "static" applies, and {times} of '
            'each sample are used again and again; set "static" (with variations: N), "refresh_each_epoch", or '
            '"disable_cache"'
        )
        return [WarningEvent(f"{key_path}.augmentations_cache_mode", message)]
    if mode is not None and not cached_variations:
        return [
            WarningEvent(
                f"{key_path}.augmentations_cache_mode", "has no effect: nothing cached changes from turn to turn"
            )
        ]
    if mode in ("disable_cache", "refresh_each_epoch") and count > 1:
        return [
            WarningEvent(
                f"{key_path}.variations", f'has an effect only with augmentations_cache_mode "static", not "{mode}"'
            )
        ]
    return []
