"""An adapter merged into a model's folder: a new folder that diffusers loads, whole or not at all.

Weights pass one at a time; everything else of the base is copied as it is. Every layer of the adapter must be in the
base, so that nothing is left out unnoticed.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from supertuner.core.errors import ModelError
from supertuner.models.adapters.keys_convert import layers_of
from supertuner.models.adapters.keys_modules import LAYOUTS
from supertuner.models.adapters.keys_schemes import HIGH, LOW, Scheme, spelled
from supertuner.train.export.adapter_files import AdapterFile, convert, of_expert, open_adapter, tensors

if TYPE_CHECKING:
    from io import BufferedReader

    from torch import Tensor, dtype

    from supertuner.train.checkpoint.tensor_file import Entry

CHUNK: Final = 8 << 20
INDEX: Final = "model_index.json"
PLAIN: Final = Scheme("bare", "diffusers", "kohya")
"""diffusers' layers, LyCORIS' tensors, alpha said: what can be merged layer by layer."""
SECOND: Final = "transformer_2"
FIRST_AND_SECOND: Final = ("transformer", SECOND)


def merge(files: Sequence[AdapterFile], base: Path, out: Path, strength: float = 1.0) -> dict[str, int]:
    """Write `base` with the adapters in it to `out`, which must not exist; part → layers that were changed. An expert
    for which there is no file stays as it is, and is told with 0."""
    from supertuner.train.checkpoint.atomic_dir import new_folder

    if not (base / INDEX).is_file():
        raise ModelError(
            f"{base} is not the folder of a diffusers pipeline: it has no {INDEX}; of a model on the hub, "
            "`hf download NAME --local-dir FOLDER` makes one"
        )
    if not math.isfinite(strength) or strength == 0:
        raise ModelError(f"--strength is {strength}; it is a number other than 0, and 1 is the adapter as trained")
    if out.exists():
        raise ModelError(f"{out} is there already; name a new folder with --out")
    adapters = _by_part(files, base)
    counts = dict.fromkeys(FIRST_AND_SECOND, 0) if (base / SECOND).is_dir() else {}
    with new_folder(out.parent, out.name, lambda there, new: False) as making:
        for entry in sorted(base.iterdir()):
            if entry.name in adapters:
                counts[entry.name] = _merged_part(adapters[entry.name], entry, making, strength)
            elif entry.is_dir():
                shutil.copytree(entry, making / entry.name)
            else:
                shutil.copy2(entry, making / entry.name)
    return counts


def _by_part(files: Sequence[AdapterFile], base: Path) -> dict[str, AdapterFile]:
    """Which folder of the base each adapter goes into. Two experts: it must be known which."""
    found: dict[str, AdapterFile] = {}
    pair = (base / SECOND).is_dir()
    for file in files:
        layout = LAYOUTS[file.reading.families[0]]
        if pair and LOW not in layout.experts:
            raise ModelError(f"{file.path} is an adapter of {layout.family}, and {base} is a model with two experts")
        for expert in file.reading.experts:
            if pair and expert is None:
                raise ModelError(f"{file.path}: {base} has two experts; say --expert {HIGH} or {LOW}")
            part = SECOND if expert == LOW else layout.part
            if not (base / part).is_dir():
                raise ModelError(f"{file.path} is for {part}, and {base} has none")
            if part in found:
                raise ModelError(f"{file.path} and {found[part].path} are both for {part}; merge one after the other")
            found[part] = file
    return found


def _merged_part(file: AdapterFile, part: Path, making: Path, strength: float) -> int:
    from supertuner.models.adapters.merge import changes_bias

    target = making / part.name
    target.mkdir()
    plain = making / f".{part.name}.adapter"
    expert = (LOW if part.name == SECOND else HIGH) if file.reading.experts != (None,) else None
    convert(of_expert(file, expert), PLAIN, plain)
    adapter = open_adapter(plain, file.reading.families[0])
    wanted = {layer.module: layer.keys for layer in layers_of(adapter.reading)}
    biased = [module for module, keys in wanted.items() if changes_bias(_called(keys))]
    changed: set[str] = set()
    for entry in sorted(part.iterdir()):
        if entry.suffix == ".safetensors":
            try:
                changed |= _merged_file(adapter, wanted, entry, target / entry.name, strength)
            except ModelError as error:
                why = f"{error}; it is damaged, or of another model"
                raise ModelError(f"{file.path} cannot be merged into {part}: {why}") from error
        else:
            shutil.copy2(entry, target / entry.name)
    plain.unlink()
    missing = sorted(module for module in wanted if not {f"{module}.weight", f"{module}.bias"} & changed)
    if missing:
        raise ModelError(
            f"{file.path}: {len(missing)} of {len(wanted)} layers are not in {part} ({', '.join(missing[:3])} …); it "
            "is an adapter of another model"
        )
    bare = sorted(module for module in biased if f"{module}.bias" not in changed)
    if bare:
        raise ModelError(
            f"{file.path} changes the bias of {len(bare)} layers that have none in {part} ({', '.join(bare[:3])} …)"
        )
    return len(wanted)


def _merged_file(
    adapter: AdapterFile, wanted: Mapping[str, Mapping[str, str]], source: Path, target: Path, strength: float
) -> set[str]:
    """A file of weights anew, in the same order and with the same header; the names of those that were changed."""
    from supertuner.train.checkpoint.tensor_file import Malformed, read_header

    changed: set[str] = set()
    with open(source, "rb") as given, open(target, "wb") as made:
        try:
            header, entries = read_header(given.fileno(), os.fstat(given.fileno()).st_size)
        except Malformed as error:
            raise ModelError(f"{source} is not a .safetensors file, or a damaged one: {error}") from error
        made.write(header)
        given.seek(len(header))
        for entry in entries:
            module, _, which = entry.name.rpartition(".")
            if module in wanted and which in ("weight", "bias"):
                content = _whole(given, entry.end - entry.begin)
                made.write(_changed(content, entry, _tensors_of(adapter, wanted[module]), strength))
                changed.add(entry.name)
            else:
                for chunk in _chunks(given, entry.end - entry.begin):
                    made.write(chunk)
        made.flush()
        os.fsync(made.fileno())
    return changed


def _changed(content: bytearray, entry: Entry, tensors_of_layer: Mapping[str, Tensor], strength: float) -> memoryview:
    import torch

    from supertuner.models.adapters.merge import merged_bias, merged_weight
    from supertuner.train.checkpoint.tensor_file import CODES

    given = _as_tensor(content, getattr(torch, CODES[entry.code][0])).reshape(entry.shape)
    module, _, which = entry.name.rpartition(".")
    merged = (merged_weight if which == "weight" else merged_bias)(given, tensors_of_layer, module, strength)
    return merged.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _tensors_of(adapter: AdapterFile, keys: Mapping[str, str]) -> dict[str, Tensor]:
    called = {key: name for name, key in _called(keys).items()}
    found = {called[key]: tensor for key, tensor in tensors(adapter, list(keys.values()))}
    for key, name in called.items():
        if not found[name].float().isfinite().all():
            raise ModelError(f"{key} has values that are no numbers")
    return found


def _called(keys: Mapping[str, str]) -> dict[str, str]:
    """What LyCORIS calls each tensor → its key."""
    return {spelled(tensor, PLAIN.spelling): key for tensor, key in keys.items()}


def _as_tensor(content: bytearray, element: dtype) -> Tensor:
    """torch takes no empty buffer."""
    import torch

    return torch.frombuffer(content, dtype=element) if content else torch.empty(0, dtype=element)


def _whole(given: BufferedReader, nbytes: int) -> bytearray:
    content = bytearray(nbytes)
    if given.readinto(content) != nbytes:
        raise ModelError(f"{given.name} became shorter while it was read")
    return content


def _chunks(given: BinaryIO, nbytes: int) -> Iterator[bytes]:
    while nbytes:
        chunk = given.read(min(CHUNK, nbytes))
        if not chunk:
            raise ModelError(f"{given.name} became shorter while it was read")
        nbytes -= len(chunk)
        yield chunk
