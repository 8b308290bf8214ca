"""A process that strace observes: for each kind of cache, reads two epochs of batches between two marks in the log."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch

from tests.train.encoding.encoding_helpers import batches, config_of, encoding_spec, open_run, tiny

BEGIN, END = "/mark-of-the-beginning", "/mark-of-the-end"


def mark(name: str) -> None:
    with suppress(FileNotFoundError):  # the attempt to open it appears in the log
        os.close(os.open(name, os.O_RDONLY))


def main(tmp: Path, kind: str) -> None:
    torch.set_num_threads(1)
    changing = {"augment": {"flip": 0.5}, "augmentations_cache_mode": "static", "variations": 2}
    rules = {"captions": {"dropout": 0.3, "trigger_word": "sks"}}
    config = config_of(
        tmp,
        {"instance_data_dir": tmp / "images", **rules},
        {"instance_data_dir": tmp / "changing", **changing},
        cache={"vae_cache_type": kind, "text_cache_type": kind, "persistent_cache": True},
    )
    family, model = tiny("wan2.2", tmp / "model")
    with open_run(config, encoding_spec(family, model)) as (corpus, encoded), ThreadPoolExecutor(1) as ahead:
        mark(f"{BEGIN}-{kind}")
        rows = 0
        for micro in batches(corpus, epochs=2):
            future = ahead.submit(lambda micro=micro: (encoded.latents(micro), encoded.texts(micro)))
            latents, texts = future.result()
            rows += len(latents["latents"]) + len(texts)
        mark(f"{END}-{kind}")
        assert rows == 2 * 2 * (4 + 3)


if __name__ == "__main__":
    for kind in sys.argv[2:]:
        main(Path(sys.argv[1]) / kind, kind)
