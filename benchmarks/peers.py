"""The stores that the arena is compared with, each in the fastest mode that its documentation names.

A peer writes `samples` ([n, nbytes] uint8) once into a folder, then fills the rows of a batch by random sample indices.
A trainer needs one contiguous batch, so a peer that returns single samples copies each into its row. The folder of
every peer is in memory, so no disk is involved.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Bytes: TypeAlias = NDArray[np.uint8]
Gather: TypeAlias = Callable[[NDArray[np.int64], Bytes], None]
"""Fill the rows of the second argument with the samples whose indices are in the first."""
Opener: TypeAlias = Callable[[Path, Bytes], Gather]
"""Write the samples into the folder and open them for reading."""

ARROW_CHUNK_BYTES = 64 << 20


def lmdb_gather(folder: Path, samples: Bytes) -> Gather:
    """LMDB: one long read transaction, `buffers=True` for values without a copy, no lock, no read-ahead.

    https://lmdb.readthedocs.io/en/release/ ("Buffers", "Environment": `lock`, `readahead` for random reads).
    """
    import lmdb

    size = 2 * samples.nbytes + (64 << 20)
    with lmdb.open(str(folder), map_size=size, sync=False) as writing, writing.begin(write=True) as transaction:
        for number in range(len(samples)):
            transaction.put(b"%08d" % number, samples[number].data, append=True)
    reading = lmdb.open(str(folder), readonly=True, lock=False, readahead=False, map_size=size)
    get = reading.begin(buffers=True).get

    def gather(numbers: NDArray[np.int64], out: Bytes) -> None:
        target, nbytes, row = out.reshape(-1).data, out.shape[1], 0
        for number in numbers.tolist():
            target[row : row + nbytes] = get(b"%08d" % number)
            row += nbytes

    return gather


def huggingface_gather(folder: Path, samples: Bytes) -> Gather:
    """HF datasets as documented for bytes: a memory-mapped Arrow file, indexed with a whole batch of indices.

    https://huggingface.co/docs/datasets/access and https://huggingface.co/docs/datasets/about_arrow. Its numpy and
    torch formats are not suitable: they turn uint8 lists into int64 (a third of the speed), and binary values into
    numpy's fixed-width bytes, which lose trailing zeros.
    """
    dataset = _arrow_dataset(folder, samples)

    def gather(numbers: NDArray[np.int64], out: Bytes) -> None:
        target, nbytes, row = out.reshape(-1).data, out.shape[1], 0
        for sample in dataset[numbers.tolist()]["sample"]:
            target[row : row + nbytes] = sample
            row += nbytes

    return gather


def huggingface_arrow_gather(folder: Path, samples: Bytes) -> Gather:
    """HF datasets with the format "arrow", reading the batch's buffers directly: the fastest use of it that we know.

    https://huggingface.co/docs/datasets/use_with_pyarrow; the buffers are documented by Arrow, not by datasets.
    """
    dataset = _arrow_dataset(folder, samples).with_format("arrow")

    def gather(numbers: NDArray[np.int64], out: Bytes) -> None:
        row, flat = 0, out.reshape(-1)
        for chunk in dataset[numbers.tolist()]["sample"].chunks:
            offsets = np.frombuffer(chunk.buffers()[1], np.int32)[chunk.offset : chunk.offset + len(chunk) + 1]
            values = np.frombuffer(chunk.buffers()[2], np.uint8)[offsets[0] : offsets[-1]]
            flat[row : row + len(values)] = values
            row += len(values)

    return gather


def _arrow_dataset(folder: Path, samples: Bytes) -> Any:
    import datasets
    import pyarrow as pa

    rows = max(1, ARROW_CHUNK_BYTES // samples.shape[1])
    schema = pa.schema([("sample", pa.binary())])
    with pa.OSFile(str(folder / "data.arrow"), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        for first in range(0, len(samples), rows):
            values = [row.tobytes() for row in samples[first : first + rows]]
            stream.write_batch(pa.record_batch([pa.array(values, pa.binary())], schema=schema))
    return datasets.Dataset.from_file(str(folder / "data.arrow"))


def safetensors_gather(folder: Path, samples: Bytes) -> Gather:
    """safetensors: `safe_open`, which maps the file and creates each tensor on request.

    https://huggingface.co/docs/safetensors/index ("lazy loading"); one tensor per sample, as a dataset of latents is.
    """
    import torch
    from safetensors import safe_open
    from safetensors.numpy import save_file

    save_file({f"{number:08}": row for number, row in enumerate(samples)}, folder / "data.safetensors")
    file: Any = safe_open(str(folder / "data.safetensors"), framework="pt")

    def gather(numbers: NDArray[np.int64], out: Bytes) -> None:
        rows = torch.from_numpy(out)
        for row, number in enumerate(numbers.tolist()):
            rows[row] = file.get_tensor(f"{number:08}")

    return gather


def mosaic_gather(folder: Path, samples: Bytes) -> Gather:
    """Mosaic streaming: MDS ("most performant"), no compression, no hashes, read in place as a map-style dataset.

    https://docs.mosaicml.com/projects/streaming/en/stable/getting_started/main_concepts.html
    """
    _import_mosaic()
    from streaming import LocalDataset, MDSWriter

    with MDSWriter(out=str(folder), columns={"sample": "bytes"}) as out:
        for row in samples:
            out.write({"sample": row.tobytes()})
    dataset = LocalDataset(str(folder))

    def gather(numbers: NDArray[np.int64], out: Bytes) -> None:
        target, nbytes, row = out.reshape(-1).data, out.shape[1], 0
        for number in numbers.tolist():
            target[row : row + nbytes] = dataset[number]["sample"]
            row += nbytes

    return gather


def webdataset_gather(folder: Path, samples: Bytes) -> Gather:
    """WebDataset: tar shards read sequentially, no shuffle buffer, no decoding. It has no random access.

    https://webdataset.github.io/webdataset/ (sequential reading is the point of the format).
    """
    import webdataset

    with webdataset.ShardWriter(str(folder / "%04d.tar"), maxsize=256 << 20, verbose=0) as out:
        for number, row in enumerate(samples):
            out.write({"__key__": f"{number:08}", "bin": row.tobytes()})
    shards = sorted(str(shard) for shard in folder.glob("*.tar"))

    def endless() -> Iterator[bytes]:
        while True:
            for sample in webdataset.WebDataset(shards, shardshuffle=False):
                yield sample["bin"]

    stream = endless()

    def gather(numbers: NDArray[np.int64], out: Bytes) -> None:
        target, nbytes = out.reshape(-1).data, out.shape[1]
        for row in range(len(numbers)):
            target[row * nbytes : (row + 1) * nbytes] = next(stream)

    return gather


class FilePerSampleDataset:
    """One file per sample, as a torch Dataset that loads a whole batch in one call (`__getitems__`)."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.folder = str(folder)
        self.nbytes = nbytes

    def __getitems__(self, numbers: list[int]) -> Any:
        import torch

        batch = torch.empty((len(numbers), self.nbytes), dtype=torch.uint8)
        for row, number in zip(batch.numpy(), numbers, strict=True):
            with open(f"{self.folder}/{number:08}.bin", "rb", buffering=0) as file:
                file.readinto(row.data)
        return batch


class ReplayBatchSampler:
    """A batch sampler for persistent workers: each epoch of the loader yields the batches that were set last."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def dataloader_rounds(folder: Path, samples: Bytes) -> Callable[[list[NDArray[np.int64]]], None]:
    """torch DataLoader over files: 2 persistent workers, prefetching, a batch read and collated inside the worker.

    https://docs.pytorch.org/docs/stable/data.html (`persistent_workers`, `prefetch_factor`, `__getitems__`). It is
    gets a whole round of batches, so that its workers can read ahead; batches arrive in shared memory without a copy.
    """
    from torch.utils.data import DataLoader

    for number, row in enumerate(samples):
        (folder / f"{number:08}.bin").write_bytes(row.data)
    turns = ReplayBatchSampler()
    dataset: Any = FilePerSampleDataset(folder, samples.shape[1])
    loader = DataLoader(
        dataset, batch_sampler=turns, num_workers=2, persistent_workers=True, prefetch_factor=4, collate_fn=_unchanged
    )

    def play(batches: list[NDArray[np.int64]]) -> None:
        turns.batches = [numbers.tolist() for numbers in batches]
        for _ in loader:
            pass

    return play


def _unchanged(batch: Any) -> Any:
    return batch


def _import_mosaic() -> None:
    """Import `streaming` with empty stand-ins for its vision, text and transformers imports, which bytes do not need.

    The stand-ins are removed again, because HF datasets checks whether transformers is importable.
    """
    if importlib.util.find_spec("streaming") is None:
        raise ModuleNotFoundError("streaming", name="streaming")
    names = {f"streaming.{part}": "" for part in ("text", "vision", "multimodal")}
    names |= {"transformers": "", "transformers.feature_extraction_utils": "BatchFeature"}
    names |= {"transformers.tokenization_utils_base": "BatchEncoding"}
    stand_ins = {name: types.ModuleType(name) for name in names if name not in sys.modules}
    for name, module in stand_ins.items():
        if names[name]:
            setattr(module, names[name], dict)
    sys.modules.update(stand_ins)
    importlib.import_module("streaming")
    for name in stand_ins:
        del sys.modules[name]


PEERS: Mapping[str, Opener] = {
    "LMDB": lmdb_gather,
    "HF datasets": huggingface_gather,
    "HF datasets, Arrow by hand": huggingface_arrow_gather,
    "safetensors": safetensors_gather,
    "Mosaic MDS": mosaic_gather,
    "WebDataset, in sequence": webdataset_gather,
}
