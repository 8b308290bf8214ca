"""Merges adapters into a copy of a model's folder, which diffusers can load; the copy is complete or not created.

Weights are processed one at a time; all other files of the base are copied unchanged. Every layer of the adapter must
exist in the base, so that no layer is silently left out.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from supertuner.config.families import FAMILIES, later_experts
from supertuner.core.errors import ModelError
from supertuner.models.adapters.keys_convert import adapter_layers
from supertuner.models.adapters.keys_schemes import KeyScheme, spell_tensor
from supertuner.train.export.adapter_files import (
    AdapterFile,
    convert_adapter,
    iter_tensors,
    open_adapter,
    select_expert,
)

if TYPE_CHECKING:
    from io import BufferedReader

    from torch import Tensor, dtype

    from supertuner.train.checkpoint.tensor_file import TensorEntry

CHUNK_BYTES: Final = 8 << 20
MODEL_INDEX_FILE: Final = "model_index.json"
MERGE_SCHEME: Final = KeyScheme("bare", "diffusers", "kohya")
"""Layer names of diffusers, tensor names of LyCORIS, explicit alpha: the form that can be merged layer by layer."""


def merge_adapters(files: Sequence[AdapterFile], base: Path, out: Path, strength: float = 1.0) -> dict[str, int]:
    """Write `base` with the adapters merged to the new folder `out`. Returns part → number of changed layers; an expert
    without an adapter is copied unchanged and has 0.

    Raises ModelError if `base` is not a diffusers pipeline, `out` exists, or an adapter does not fit the base.
    """
    from supertuner.core.atomic_folder import atomic_folder

    if not (base / MODEL_INDEX_FILE).is_file():
        raise ModelError(
            f"{base} is not the folder of a diffusers pipeline: it has no {MODEL_INDEX_FILE}; download a model from "
            "the hub with `hf download NAME --local-dir FOLDER`"
        )
    if not math.isfinite(strength) or strength == 0:
        raise ModelError(f"strength is {strength}; it must be finite and not 0 (1 is the adapter as trained)")
    if out.exists():
        raise ModelError(f"{out} exists; name a new folder with `out`")
    adapters = _adapters_by_part(files, base)
    counts = dict.fromkeys(_expert_folders(base), 0)
    with atomic_folder(out.parent, out.name, lambda there, new: False) as work_dir:
        for entry in sorted(base.iterdir()):
            if entry.name in adapters:
                counts[entry.name] = _merge_part(adapters[entry.name], entry, work_dir, strength)
            elif entry.is_dir():
                shutil.copytree(entry, work_dir / entry.name)
            else:
                shutil.copy2(entry, work_dir / entry.name)
    return counts


def _expert_folders(base: Path) -> list[str]:
    """The folders of the base's experts; none if it has one denoiser."""
    if not any((base / part).is_dir() for part in later_experts().values()):
        return []
    parts = dict.fromkeys(part for record in FAMILIES.values() for part in record.experts.values())
    return [part for part in parts if (base / part).is_dir()]


def _adapters_by_part(files: Sequence[AdapterFile], base: Path) -> dict[str, AdapterFile]:
    """Folder of the base → adapter to merge into it. If the base has several experts, adapters name theirs."""
    by_part: dict[str, AdapterFile] = {}
    several_experts = bool(_expert_folders(base))
    for file in files:
        family = file.reading.families[0]
        part_by_expert = FAMILIES[family].experts
        if several_experts and not FAMILIES[family].has_several_experts:
            raise ModelError(f"{file.path} is an adapter of {family}, but {base} is a model with several experts")
        for expert in file.reading.experts:
            if several_experts and expert is None:
                choices = " or ".join(part_by_expert)
                raise ModelError(f"{file.path}: {base} has several experts; set `expert` to {choices}")
            part = next(iter(part_by_expert.values())) if expert is None else part_by_expert[expert]
            if not (base / part).is_dir():
                raise ModelError(f"{file.path} is for {part}, but {base} has no such folder")
            if part in by_part:
                raise ModelError(
                    f"{file.path} and {by_part[part].path} are both for {part}; merge them one after the other"
                )
            by_part[part] = file
    return by_part


def _merge_part(file: AdapterFile, part: Path, work_dir: Path, strength: float) -> int:
    from supertuner.models.adapters.merge import changes_bias

    target = work_dir / part.name
    target.mkdir()
    converted = work_dir / f".{part.name}.adapter"
    experts = FAMILIES[file.reading.families[0]].experts.items()
    marked = file.reading.experts != (None,)
    expert = next(name for name, component in experts if component == part.name) if marked else None
    convert_adapter(select_expert(file, expert), MERGE_SCHEME, converted)
    adapter = open_adapter(converted, file.reading.families[0])
    layer_keys = {layer.module: layer.keys for layer in adapter_layers(adapter.reading)}
    layers_with_bias = [module for module, keys in layer_keys.items() if changes_bias(_lycoris_names(keys))]
    changed: set[str] = set()
    for entry in sorted(part.iterdir()):
        if entry.suffix == ".safetensors":
            try:
                changed |= _merge_file(adapter, layer_keys, entry, target / entry.name, strength)
            except ModelError as error:
                reason = f"{error}; it is damaged, or made for another model"
                raise ModelError(f"{file.path} cannot be merged into {part}: {reason}") from error
        else:
            shutil.copy2(entry, target / entry.name)
    converted.unlink()
    missing = sorted(module for module in layer_keys if not {f"{module}.weight", f"{module}.bias"} & changed)
    if missing:
        raise ModelError(
            f"{file.path}: {len(missing)} of {len(layer_keys)} layers are not in {part} ({', '.join(missing[:3])} …); "
            "it was made for another model"
        )
    layers_without_target_bias = sorted(module for module in layers_with_bias if f"{module}.bias" not in changed)
    if layers_without_target_bias:
        examples = ", ".join(layers_without_target_bias[:3])
        raise ModelError(
            f"{file.path} changes the bias of {len(layers_without_target_bias)} layers that have none in {part} "
            f"({examples} …); it was made for another model"
        )
    return len(layer_keys)


def _merge_file(
    adapter: AdapterFile, layer_keys: Mapping[str, Mapping[str, str]], source: Path, target: Path, strength: float
) -> set[str]:
    """Write a copy of a weight file with the adapter merged, with the same header and order. Returns the names of the
    changed tensors."""
    from supertuner.train.checkpoint.tensor_file import MalformedTensorFileError, read_header

    changed: set[str] = set()
    with open(source, "rb") as source_file, open(target, "wb") as target_file:
        try:
            header, entries = read_header(source_file.fileno(), os.fstat(source_file.fileno()).st_size)
        except MalformedTensorFileError as error:
            raise ModelError(f"{source} is damaged or not a .safetensors file: {error}") from error
        target_file.write(header)
        source_file.seek(len(header))
        for entry in entries:
            module, _, which = entry.name.rpartition(".")
            if module in layer_keys and which in ("weight", "bias"):
                content = _read_exactly(source_file, entry.end - entry.begin)
                target_file.write(
                    _merge_tensor(content, entry, _load_layer_tensors(adapter, layer_keys[module]), strength)
                )
                changed.add(entry.name)
            else:
                for chunk in _read_chunks(source_file, entry.end - entry.begin):
                    target_file.write(chunk)
        target_file.flush()
        os.fsync(target_file.fileno())
    return changed


def _merge_tensor(
    content: bytearray, entry: TensorEntry, adapter_tensors: Mapping[str, Tensor], strength: float
) -> memoryview:
    import torch

    from supertuner.models.adapters.merge import merged_bias, merged_weight
    from supertuner.train.checkpoint.tensor_file import DTYPE_BY_CODE

    original = _as_tensor(content, getattr(torch, DTYPE_BY_CODE[entry.dtype_code][0])).reshape(entry.shape)
    module, _, which = entry.name.rpartition(".")
    merged = (merged_weight if which == "weight" else merged_bias)(original, adapter_tensors, module, strength)
    return merged.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _load_layer_tensors(adapter: AdapterFile, keys: Mapping[str, str]) -> dict[str, Tensor]:
    name_by_key = {key: name for name, key in _lycoris_names(keys).items()}
    loaded = {name_by_key[key]: tensor for key, tensor in iter_tensors(adapter, list(keys.values()))}
    for key, name in name_by_key.items():
        if not loaded[name].float().isfinite().all():
            raise ModelError(f"{key} contains NaN or infinite values")
    return loaded


def _lycoris_names(keys: Mapping[str, str]) -> dict[str, str]:
    """Name of each tensor in LyCORIS → its key."""
    return {spell_tensor(tensor, MERGE_SCHEME.spelling): key for tensor, key in keys.items()}


def _as_tensor(content: bytearray, element: dtype) -> Tensor:
    """The bytes as a tensor of this dtype, without a copy; torch.frombuffer rejects an empty buffer."""
    import torch

    return torch.frombuffer(content, dtype=element) if content else torch.empty(0, dtype=element)


def _read_exactly(file: BufferedReader, nbytes: int) -> bytearray:
    content = bytearray(nbytes)
    if file.readinto(content) != nbytes:
        raise ModelError(f"{file.name} was truncated while it was read")
    return content


def _read_chunks(file: BinaryIO, nbytes: int) -> Iterator[bytes]:
    while nbytes:
        chunk = file.read(min(CHUNK_BYTES, nbytes))
        if not chunk:
            raise ModelError(f"{file.name} was truncated while it was read")
        nbytes -= len(chunk)
        yield chunk
