"""DoRA for ComfyUI: magnitudes that give the trained weights there.

ComfyUI computes m · (W + ΔW) / ‖W‖ where DoRA is defined as m · (W + ΔW) / ‖W + ΔW‖ (arXiv 2402.09353, eq. 5). A file
for ComfyUI therefore holds m · ‖W‖ / ‖W + ΔW‖, for which the base weights W must be known. It is for ComfyUI only.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from supertuner.core.errors import ModelError
from supertuner.models.adapters.attach import TrainableExpert
from supertuner.models.adapters.keys import read_keys
from supertuner.models.adapters.keys_convert import adapter_layers
from supertuner.models.adapters.keys_schemes import DORA_SCALE, KeyScheme, spell_tensor
from supertuner.models.adapters.merge import comfyui_magnitude_factors
from supertuner.models.spec import Tensors
from supertuner.train.checkpoint.tensor_file import DTYPE_BY_CODE, MalformedTensorFileError, TensorEntry, read_header
from supertuner.train.export.adapter_files import AdapterFile, iter_tensors

MAGNITUDES_FACT: Final = {"dora": "magnitudes for ComfyUI: multiplied by |W| / |W + dW|"}
"""Recorded in the metadata of a corrected file."""


@torch.no_grad()
def trained_magnitude_factors(trainable: TrainableExpert, tensors: Tensors, prefix: str) -> Tensors:
    """Layer → factors of its magnitudes, for a DoRA in training whose exported tensors are given."""
    factors = {}
    for layer in trainable.layers:
        module: Any = trainable.module.get_submodule(layer)
        weight = module.get_base_layer().weight
        names = {"lora_down.weight": "lora_A.weight", "lora_up.weight": "lora_B.weight"}
        pair = {ours: tensors[f"{prefix}.{layer}.{theirs}"].to(weight.device) for ours, theirs in names.items()}
        factors[layer] = comfyui_magnitude_factors(weight, pair, layer).cpu()
    return factors


@torch.no_grad()
def file_magnitude_factors(file: AdapterFile, weight_files: Sequence[Path]) -> Tensors:
    """Layer → factors of its magnitudes, for the file of one expert. `weight_files`: those of its denoiser, in
    diffusers' format; one weight at a time is in memory."""
    weights = _find_tensors(weight_files)
    factors = {}
    for layer in adapter_layers(file.reading):
        if DORA_SCALE in layer.keys:
            name_by_key = {key: spell_tensor(tensor, "kohya") for tensor, key in layer.keys.items()}
            tensors = {name_by_key[key]: tensor for key, tensor in iter_tensors(file, list(name_by_key))}
            if (stored := weights.get(f"{layer.module}.weight")) is None:
                raise ModelError(f"{file.path} has a layer {layer.module} that the base model lacks: it is for another")
            factors[layer.module] = comfyui_magnitude_factors(stored.read(), tensors, layer.module)
    return factors


def correct_magnitudes(tensors: Tensors, factors: Tensors, scheme: KeyScheme, family: str) -> Tensors:
    """The tensors of a converted file, with the magnitudes of each layer multiplied by its factors.

    Magnitudes per input, which older versions of LyCORIS write, need none: ComfyUI computes these as defined.
    """
    corrected = dict(tensors)
    for key, name in read_keys(tensors, family).names.items():
        magnitudes = tensors[key]
        if name.tensor == DORA_SCALE and magnitudes.shape[0] == magnitudes.numel():
            if name.module not in factors:
                raise ModelError(f"{name.module}: its base weight is not known, but {scheme.name} needs it for DoRA")
            values = magnitudes.float() * factors[name.module].reshape(magnitudes.shape)
            corrected[key] = values.to(magnitudes.dtype)
    return corrected


class _StoredTensor(NamedTuple):
    path: Path
    begin: int
    entry: TensorEntry

    def read(self) -> torch.Tensor:
        with open(self.path, "rb") as stream:
            stream.seek(self.begin)
            content = bytearray(stream.read(self.entry.end - self.entry.begin))
        dtype: torch.dtype = getattr(torch, DTYPE_BY_CODE[self.entry.dtype_code][0])
        return torch.frombuffer(content, dtype=dtype).reshape(self.entry.shape)


def _find_tensors(files: Sequence[Path]) -> dict[str, _StoredTensor]:
    """Name → where the tensor is."""
    tensors: dict[str, _StoredTensor] = {}
    for path in files:
        with open(path, "rb") as stream:
            try:
                header, entries = read_header(stream.fileno(), path.stat().st_size)
            except MalformedTensorFileError as error:
                raise ModelError(f"{path} is damaged or not a .safetensors file: {error}") from error
        tensors |= {entry.name: _StoredTensor(path, len(header) + entry.begin, entry) for entry in entries}
    return tensors
