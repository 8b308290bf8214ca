"""Creates a large staged and cached dataset in seconds, to measure what it costs each rank.

Each sample has a caption and almost no bytes. The source folder does not exist, so only the staged data are used.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from supertuner.arena.home import ArenaHome
from supertuner.arena.run_context import RunContext
from supertuner.cache.entries import EntryIndices, EntryRequest, NamedTensors
from supertuner.cache.location import cache_placement
from supertuner.cache.store import CacheStore
from supertuner.config.settings.data import DatasetSettings
from supertuner.config.settings.run_config import RunConfig
from supertuner.core.types import JSON
from supertuner.data.corpus_loader import open_corpus
from supertuner.data.staging.columns import CAPTION_BYTES, CAPTION_INDEX, CAPTION_OFFSETS, COLUMNS
from supertuner.data.staging.fingerprint import STAGED_VERSION, origin_digest
from supertuner.data.staging.staged_dataset import SET_ASIDE_TABLE
from supertuner.models.spec import Family, ModelDescription
from supertuner.train.encoding.cache_plan import CACHE_KINDS, build_cache_plan, cache_requirements
from supertuner.train.encoding.encoders import EncoderFingerprints, EncodingSpec

SIDES = (512, 640, 768)
LATENTS = (4, 8, 8)


def config_of(folder: Path) -> RunConfig:
    """A run whose dataset's folder does not exist."""
    dataset = {"id": "large", "instance_data_dir": folder / "gone", "resolution": 512, "bucket_step": 64}
    settings = {"run": {"output_dir": folder / "runs"}, "arena": {"home": folder / "home"}, "datasets": [dataset]}
    return RunConfig.model_validate(settings)


def stage(home: ArenaHome, dataset: DatasetSettings, count: int) -> str:
    """Create an arena with `count` samples of the dataset. Returns its name."""
    name = f"{dataset.id}-of-{count}"
    with home.build(name) as build:
        writer = build.open_writer()
        for number in range(count):
            unit = writer.begin(f"part-{number * 7919 % 100:02d}/{number:09d}")
            unit.put("media", number.to_bytes(4, "little") if count <= 200_000 else b"")
            unit.commit()
        for column, values in _columns(count).items():
            build.put_table(column, values)
        meta: dict[str, JSON] = {
            "holds": "staged dataset",
            "version": STAGED_VERSION,
            "dataset": dataset.id,
            "kind": "image",
            "fingerprint": f"{count} samples",
            "source": str(dataset.instance_data_dir),
            "origin": origin_digest(dataset),
            "bytes": 0,
            "formats": {},
            "set_aside": 0,
            "without_caption": 0,
        }
        build.seal(meta)
    return name


def fill_caches(config: RunConfig) -> None:
    """Create every cache entry that a run on the staged samples needs."""
    context, encoding = RunContext.silent(config.run.output_dir), encoding_of()
    with open_corpus(config, context) as corpus:
        needs = cache_requirements(config, corpus, encoding.fingerprints, encoding.dtype)
        plan = build_cache_plan(needs)
        for what in CACHE_KINDS:
            location = cache_placement("unified_memory", config, config.run.output_dir, "until_removed").primary
            shape = LATENTS if what == "latents" else (0,)
            with CacheStore(location, needs.namespace(what), context) as store:
                store.fill(EntryRequest(plan.keys(what), _StubEntries(shape).make))


def encoding_of() -> EncodingSpec:
    """A stub; nothing is ever encoded with it."""
    family, model = Family.__new__(Family), ModelDescription.__new__(ModelDescription)
    object.__setattr__(family, "unsupported_reason", lambda model, shape: None)
    object.__setattr__(model, "media_kinds", frozenset({"image"}))
    object.__setattr__(model, "edits_images", False)
    return EncodingSpec(family, model, EncoderFingerprints("media", "text"), torch.device("cpu"), torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class _StubEntries:
    shape: tuple[int, ...]

    def make(self, numbers: EntryIndices) -> Generator[tuple[int, NamedTensors], None, None]:
        field = "latents" if math.prod(self.shape) else "embeds"
        entry = {field: torch.zeros(self.shape, dtype=torch.bfloat16)}
        for number in numbers.tolist():
            yield number, entry


def _columns(count: int) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
    columns: dict[str, np.ndarray[Any, np.dtype[Any]]] = {
        name: np.zeros(count, np.int32 if code == "i" else np.float32) for name, code in COLUMNS.items()
    }
    columns["width"][:] = np.array(SIDES, np.int32)[np.arange(count) % len(SIDES)]
    columns["height"][:] = SIDES[0]
    columns["orientation"][:] = 1
    captions = [f"a caption of sample {number}, with a few words about it".encode() for number in range(count)]
    columns[CAPTION_INDEX] = np.arange(count + 1, dtype=np.int64)
    columns[CAPTION_OFFSETS] = np.concatenate([[0], np.cumsum([len(caption) for caption in captions])]).astype(np.int64)
    columns[CAPTION_BYTES] = np.frombuffer(b"".join(captions), np.uint8)
    columns[SET_ASIDE_TABLE] = np.frombuffer(b"[]", np.uint8)
    return columns
