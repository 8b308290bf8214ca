"""Decides how a dataset's media and captions are cached: once, in variations, for each epoch, or not at all. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from supertuner.config.settings.cache import CacheConfig
from supertuner.config.settings.data import DatasetSettings
from supertuner.core.events import WarningEvent


class CacheMode(StrEnum):
    CACHED = "cached"
    EACH_EPOCH = "encoded for each epoch"
    ON_THE_FLY = "encoded when used"


@dataclass(frozen=True, slots=True)
class DatasetCachePolicy:
    """The cache policy of one dataset."""

    media_mode: CacheMode
    text_mode: CacheMode
    media_variations: int = 1
    """For CACHED: in how many cycles' augmentations a sample is cached. Cycle c uses variation c modulo this."""
    text_variations: int = 1
    """The same for shuffled tags. The choice among several captions and caption dropout still differ in every cycle."""


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


def varying_media_settings(settings: DatasetSettings) -> str:
    """The settings because of which a sample's media differ from cycle to cycle; empty if they never differ."""
    reasons = [f"augment.{name}" for name, value in settings.augment if value]
    return ", ".join([*reasons, *(['crop: "random"'] if settings.crop == "random" else [])])


def varying_caption_settings(settings: DatasetSettings) -> str:
    """The settings because of which a sample has too many possible captions to list; empty if they can be listed."""
    return "captions.shuffle_tags" if settings.captions.shuffle_tags else ""


def cache_policy_warnings(datasets: Sequence[DatasetSettings], cache: CacheConfig) -> list[WarningEvent]:
    """Warnings about a default that changes what the model learns, and about settings without effect."""
    return [warning for settings in datasets for warning in _dataset_warnings(settings, cache)]


def _dataset_warnings(settings: DatasetSettings, cache: CacheConfig) -> list[WarningEvent]:
    key_path = f"datasets[{settings.id}]"
    media = varying_media_settings(settings) if cache.vae_cache_type != "none" else ""
    captions = varying_caption_settings(settings) if cache.text_cache_type != "none" else ""
    cached_variations = [names for names in (media, captions) if names]
    mode, count = settings.augmentations_cache_mode, settings.variations
    if mode is None and cached_variations:
        reused = "1 cached variation" if count == 1 else f"{count} cached variations"
        message = (
            f'is not set, so "static" applies: {", ".join(cached_variations)} would give a new variation of a sample '
            f'each time it is drawn, but training reuses {reused} of each sample; set "static" (with variations: N), '
            '"refresh_each_epoch", or "disable_cache"'
        )
        return [WarningEvent(f"{key_path}.augmentations_cache_mode", message)]
    if mode is not None and not cached_variations:
        message = "has no effect: no cached entry of this dataset differs from epoch to epoch"
        return [WarningEvent(f"{key_path}.augmentations_cache_mode", message)]
    if mode in ("disable_cache", "refresh_each_epoch") and count > 1:
        message = f'has an effect only with augmentations_cache_mode "static", not "{mode}"'
        return [WarningEvent(f"{key_path}.variations", message)]
    return []
