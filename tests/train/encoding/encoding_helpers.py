"""Helpers for tests of encoded data: small real datasets, tiny models, and encoders that count what they encode."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from supertuner.arena.node_peers import NO_PEERS, NodePeers
from supertuner.arena.run_context import RunContext
from supertuner.config.settings.run_config import RunConfig
from supertuner.core.events import NullSink
from supertuner.core.host import HostFacts
from supertuner.data.corpus import Corpus
from supertuner.data.corpus_loader import open_corpus
from supertuner.data.ordering.micro_batches import MicroBatch, single_micro_batch
from supertuner.models.family_loader import load_family as family_of
from supertuner.models.fingerprint import fingerprint
from supertuner.models.spec import Family, ModelDescription, ModelSource
from supertuner.train.encoding.cache_lookup import EncodedCorpus
from supertuner.train.encoding.corpus_caches import open_encoded_corpus
from supertuner.train.encoding.encoders import EncoderFingerprints, EncodingSpec
from tests.data.media_files import picture, sound, video, write

CPU = torch.device("cpu")


@dataclasses.dataclass
class EncoderCounts:
    """Which encoders were built, and what they encoded."""

    made: list[str] = dataclasses.field(default_factory=list)
    samples: int = 0
    captions: list[str] = dataclasses.field(default_factory=list)


def with_counting_encoders(family: Family) -> tuple[Family, EncoderCounts]:
    """The family with encoders that count, and their counts."""
    count = EncoderCounts()

    class Media:
        def __init__(self, *args) -> None:
            count.made.append("media")
            self.inner = family.build_media_encoder(*args)

        def encode(self, media):
            count.samples += len(media)
            return self.inner.encode(media)

    class Text:
        def __init__(self, *args) -> None:
            count.made.append("text")
            self.inner = family.build_text_encoder(*args)

        @property
        def truncated_captions(self):
            return self.inner.truncated_captions

        def encode(self, captions):
            count.captions += captions
            return self.inner.encode(captions)

    return dataclasses.replace(family, build_media_encoder=Media, build_text_encoder=Text), count


def tiny(name: str, folder: Path) -> tuple[Family, ModelDescription]:
    family = family_of(name)
    if not folder.exists():
        family.write_tiny_pipeline(folder, 0)
    return family, family.read_model(ModelSource(str(folder), offline=True))


def encoding_spec(family: Family, model: ModelDescription, dtype: torch.dtype = torch.bfloat16) -> EncodingSpec:
    files = (family.media_files(model), family.text_files(model))
    return EncodingSpec(family, model, EncoderFingerprints(*(fingerprint(paths, None) for paths in files)), CPU, dtype)


class SoundEncoder:
    """Replaces the encoder of an audio family, which does not exist yet: means of short frames, and one more field."""

    def encode(self, media: torch.Tensor) -> dict[str, torch.Tensor]:
        assert media.dtype == torch.float32 and media.ndim == 3
        return {"latents": media.unfold(-1, 400, 400).mean(-1), "loudness": media.abs().mean((1, 2))}


def pictures(folder: Path, count: int = 8, size: tuple[int, int] = (56, 40), captions: bool = True) -> Path:
    files: dict[str, bytes | str] = {}
    for number in range(count):
        files[f"p{number}.jpg"] = picture(size=size, seed=number)
        if captions:
            files[f"p{number}.txt"] = f"red, round, number {number}"
    return write(folder, files)


def videos(folder: Path, count: int = 2) -> Path:
    return write(folder, {f"v{number}.mp4": video(frames=9 + 4 * number) for number in range(count)})


def sounds(folder: Path, count: int = 3) -> Path:
    return write(folder, {f"s{number}.wav": sound(seconds=0.5 + 0.25 * number) for number in range(count)})


def config_of(tmp: Path, *datasets: dict, cache: dict | None = None, **more) -> RunConfig:
    """A run below `tmp` with small buckets; dataset number i has the id `seti`."""
    blocks = [
        {"id": f"set{number}", "resolution": 32, "bucket_step": 16, **block} for number, block in enumerate(datasets)
    ]
    return RunConfig.model_validate(
        {
            "run": {"output_dir": tmp / "runs", "seed": 5},
            "arena": {"home": tmp / "ram"},
            "train": {"batch_size": 3},
            "loader": {"num_workers": 2},
            "cache_config": cache or {},
            "datasets": blocks,
            **more,
        }
    )


@contextmanager
def open_run(
    config: RunConfig, encoding: EncodingSpec, sink=None, peers: NodePeers = NO_PEERS, **options
) -> Iterator[tuple[Corpus, EncodedCorpus]]:
    """The corpus and its encoded samples. Only events of encoding go to `sink`."""
    run_dir, sink = config.run.output_dir / "run", sink or NullSink()
    progress = sink if hasattr(sink, "phase") else NullSink()
    with (
        open_corpus(config, RunContext.silent(run_dir)) as corpus,
        open_encoded_corpus(
            config, corpus, encoding, RunContext(run_dir, sink, progress, HostFacts(), peers), **options
        ) as encoded,
    ):
        yield corpus, encoded


def batches(corpus: Corpus, epochs: int = 2) -> list[MicroBatch]:
    order = corpus.order
    return [single_micro_batch(order, draws) for draws in order.batches(0, order.epoch_begin(epochs))]


def read_all_positions(corpus: Corpus, encoded: EncodedCorpus, epochs: int = 2) -> dict[int, tuple[dict, dict]]:
    """Latents and text by position."""
    by_position = {}
    for micro in batches(corpus, epochs):
        latents, texts = encoded.latents(micro), encoded.texts(micro)
        assert all(field.is_contiguous() and field.device == CPU for field in latents.values())
        assert all(len(field) == len(micro) for field in latents.values())
        for row, position in enumerate(micro.draws.position.tolist()):
            by_position[position] = (
                {name: field[row].clone() for name, field in latents.items()},
                {name: field.clone() for name, field in texts[row].items()},
            )
    return by_position


def equal(left: dict, right: dict) -> bool:
    """Whether two runs have the same bits at every position."""
    return left.keys() == right.keys() and all(
        mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
        for position in left
        for mine, theirs in zip(left[position], right[position], strict=True)
    )


def arenas(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*") if path.is_dir()) if folder.exists() else []


def without_caches(config: RunConfig) -> RunConfig:
    """The same run without caches: the reference that caches are compared with."""
    none = config.cache_config.model_copy(update={"vae_cache_type": "none", "text_cache_type": "none"})
    return config.model_copy(update={"cache_config": none})
