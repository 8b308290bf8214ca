"""Loads components of a pipeline: frozen, complete, aligned, and without changing the global random state.

The libraries map .safetensors files into memory. A tensor that has the requested number format stays in the mapping
until it is placed, one tensor or layer at a time. So a module on its way to a GPU is not in host memory as a whole.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from supertuner.core.errors import ModelError
from supertuner.core.interrupts import interrupts_win
from supertuner.models.library_guards import quiet_libraries
from supertuner.models.meta_modules import PlaceholderTokenizer, build_without_weights
from supertuner.models.pipeline_files import pipeline_folder, weight_files
from supertuner.models.spec import Expert, ModelDescription, ModelSource

TRUSTED_LIBRARIES: Final = ("diffusers", "transformers")
"""Libraries whose classes may be loaded: an index can name any module, and importing it would run its code."""

STORED_FORMATS: Final = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Floating-point formats by their names in .safetensors headers."""

SCALE_SUFFIXES: Final = (".scale_weight", ".weight_scale", ".scale_input", "scaled_fp8")
"""Endings of the tensors in which other programs store the scales of fp8 weights."""

MAX_HEADER_BYTES: Final = 100_000_000
"""The limit of the .safetensors format for a header."""

PlaceWeights: TypeAlias = Callable[[nn.Module], object]
"""Replaces every tensor of a loaded module, which may be mapped from a file, by a copy in memory."""


def place_tensors(module: nn.Module, device: torch.device, *, recurse: bool = True) -> None:
    """Copy each tensor into newly allocated memory of a device, one after the other, so that only one exists twice.

    `recurse`: also those of submodules. Memory mapped from a .safetensors file may start at any address, and CPU
    kernels round differently on unaligned data: equal weights would give results that differ in the last bits from one
    load to the next. On the way to a GPU a tensor is copied first as well: copies from a file mapping to a GPU have
    been reported to hang on hosts with pages of 64 KiB.
    """
    for tensor in (*module.parameters(recurse), *module.buffers(recurse)):
        aligned = tensor.data.clone() if tensor.device.type == "cpu" else tensor.data
        tensor.data = aligned.to(device)


def to_device(device: torch.device) -> PlaceWeights:
    """Places all tensors on a device."""
    return partial(place_tensors, device=device)


ON_HOST: Final = to_device(torch.device("cpu"))


def load_denoiser(
    model: ModelDescription, expert: Expert, dtype: torch.dtype, place: PlaceWeights = ON_HOST
) -> nn.Module:
    """The module of an expert."""
    return load_module(model, expert.component, dtype, place)


@interrupts_win()
def load_module(
    model: ModelDescription, component: str, dtype: torch.dtype, place: PlaceWeights = ON_HOST
) -> nn.Module:
    """A component with weights: in eval mode, frozen, in the memory where `place` puts it.

    Submodules that its class keeps in fp32 (norms, time embeddings) are fp32 whatever `dtype` is. Raises ModelError if
    a file is damaged, incomplete or of another class.
    """
    if model.source.without_weights:
        return build_without_weights(lambda: build_meta_module(model, component), dtype)
    library_class = component_class(model, component)
    folder = pipeline_folder(model.source, (component,))
    single_file = model.source.single_files.get(component)
    where = single_file or folder / component
    for file in weight_files(model.source, folder, component):
        read_weight_header(file)
    with quiet_libraries(), _unchanged_random_state():
        try:
            if single_file is not None:
                loaded = _from_single_file(library_class, single_file, folder, component, dtype)
            else:
                loaded = _from_folder(library_class, model.source.variant, folder, component, dtype)
        except (OSError, ValueError, TypeError, AttributeError, RuntimeError, KeyError, ImportError) as error:
            # An unsuitable config fails in any of these ways.
            raise ModelError(f"{where} cannot be loaded as {library_class.__name__}: {_first_line(error)}") from error
        require_values(loaded, f"{where}")
        place(loaded.eval().requires_grad_(False))
    return loaded


def require_values(module: nn.Module, source: str) -> None:
    """ModelError if a parameter or a buffer is on the meta device: it has a shape, but no values."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    if empty := next((name for name, tensor in tensors if tensor.is_meta), None):
        raise ModelError(f"{source} was not loaded completely: {empty} has no values; start again, and report this")


def copied_bytes(source: ModelSource, component: str, dtype: torch.dtype) -> int | None:
    """Bytes of host memory that loading a component in `dtype` takes beside the mapped files; None: its files are not
    on this machine.

    The libraries copy a tensor whose stored number format differs; others stay mapped. From a single file, diffusers
    makes a module in fp32.
    """
    try:
        folder = pipeline_folder(replace(source, offline=True), (component,))
        files = weight_files(source, folder, component)
        tensors = [entry for file in files for entry in _stored_tensors(file)]
    except (ModelError, OSError, SafetensorError):
        return None  # loading reports what is missing or damaged
    requested = torch.float32 if component in source.single_files else dtype
    return sum(count * requested.itemsize for count, stored in tensors if stored is not requested)


def _stored_tensors(file: Path) -> list[tuple[int, torch.dtype]]:
    """Number of elements and number format of each floating-point tensor in a file, from its header alone."""
    with safe_open(file, framework="pt") as weights:
        slices = [weights.get_slice(name) for name in weights.keys()]  # noqa: SIM118 (it is not a mapping)
        return [
            (prod(one.get_shape()), STORED_FORMATS[one.get_dtype()])
            for one in slices
            if one.get_dtype() in STORED_FORMATS
        ]


def _unchanged_random_state() -> AbstractContextManager[None]:
    """Restores torch's global random state after a load. Not in a thread beside training, because that would undo the
    draws of training; a load from complete files draws nothing."""
    if threading.current_thread() is threading.main_thread():
        return torch.random.fork_rng(devices=[])
    return nullcontext()


@interrupts_win()
def build_meta_module(model: ModelDescription, component: str) -> nn.Module:
    """A component on the meta device: layers and shapes without memory."""
    library_class = component_class(model, component)
    with quiet_libraries(), torch.device("meta"):
        try:
            meta_module = _from_config(library_class, dict(model.configs[component]))
        except (ValueError, TypeError, AttributeError, RuntimeError, KeyError) as error:
            problem = f"the config of {component} is not one of {library_class.__name__}: {_first_line(error)}"
            raise ModelError(f"{model.source.path}: {problem}") from error
    assert isinstance(meta_module, nn.Module)
    return meta_module


@interrupts_win()
def load_tokenizer_or_scheduler(model: ModelDescription, component: str) -> Any:
    """A component without weights: a tokenizer or a scheduler."""
    if model.source.without_weights and not model.source.loads_tokenizers:
        return PlaceholderTokenizer(model.source.assumed_caption_tokens)
    library_class = component_class(model, component)
    folder = pipeline_folder(model.source, (component,))
    with quiet_libraries():
        try:
            return library_class.from_pretrained(str(folder), subfolder=component, local_files_only=True)
        except (OSError, ValueError, TypeError, KeyError) as error:
            reason = f"{library_class.__name__}: {_first_line(error)}"
            raise ModelError(f"{folder / component} cannot be loaded as {reason}") from error


def component_class(model: ModelDescription, component: str) -> Any:
    """The class that the pipeline's index names for a component."""
    library, name = map(str, model.configs[""][component])  # type: ignore[call-overload]  # checked by read_component_configs
    if library not in TRUSTED_LIBRARIES:
        raise ModelError(
            f"{model.source.path}: its {component} is a class of {library}, which is not loaded: only classes of "
            f"{' and '.join(TRUSTED_LIBRARIES)} are"
        )
    library_class = getattr(import_module(library), name, None)
    if library_class is None:
        raise ModelError(f"{model.source.path}: the installed {library} has no {name}, which is its {component}")
    return library_class


def _from_config(component_class: Any, config: dict[str, Any]) -> Any:
    """A module from its config, in the way of its library."""
    if component_class.__module__.startswith("diffusers."):
        return component_class.from_config(config)
    return component_class(component_class.config_class.from_dict(config))


def _from_folder(component_class: Any, variant: str | None, folder: Path, name: str, dtype: torch.dtype) -> nn.Module:
    # The argument has different names in the two libraries, and each ignores unknown arguments.
    dtype_argument = {"torch_dtype" if component_class.__module__.startswith("diffusers.") else "dtype": dtype}
    loaded, report = component_class.from_pretrained(
        str(folder),
        subfolder=name,
        variant=variant,
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
        **dtype_argument,
    )
    if missing := sorted(report["missing_keys"]):
        examples = ", ".join(missing[:3]) + (" …" if len(missing) > 3 else "")
        lacking = f"{len(missing)} tensors that its config needs ({examples})"
        raise ModelError(f"{folder / name} lacks {lacking}; download it again")
    assert isinstance(loaded, nn.Module)
    return loaded


def _from_single_file(component_class: Any, file: Path, folder: Path, component: str, dtype: torch.dtype) -> nn.Module:
    """Weights with the names of diffusers or of the model's original code; the config is that of the pipeline."""
    if not hasattr(component_class, "from_single_file"):
        raise ModelError(f"{file}: diffusers cannot load a {component_class.__name__} from a single file; use a folder")
    try:
        source: dict[str, Any] = {"config": str(folder), "subfolder": component}
        loaded = component_class.from_single_file(str(file), **source, local_files_only=True)
    except NotImplementedError as error:
        # Raised when diffusers moves the module: missing tensors are on the meta device.
        raise ModelError(f"{file} lacks tensors of {folder / component}; it belongs to another model") from error
    assert isinstance(loaded, nn.Module)
    fp32_names = tuple(getattr(component_class, "_keep_in_fp32_modules", None) or ())
    for name, tensor in (*loaded.named_parameters(), *loaded.named_buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if set(fp32_names) & set(name.split(".")) else dtype)
    return loaded


def read_weight_header(file: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors in a .safetensors file, without reading a tensor.

    Raises ModelError for a truncated, foreign or scaled fp8 file.
    """
    try:
        with safe_open(file, framework="pt") as weights:
            shapes = {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        problem = _truncation(file) or f"is damaged ({_first_line(error)})"
        raise ModelError(f"{file} {problem}; download it again") from error
    if scale := next((name for name in shapes if name.endswith(SCALE_SUFFIXES)), None):
        raise ModelError(
            f"{file} holds 8-bit weights with separate scales ({scale}), which loading would ignore; use a file in "
            "bf16 or fp16, and model.base_weights for 8-bit weights"
        )
    return shapes


def _truncation(file: Path) -> str | None:
    """How much of a damaged file is there, if its header can be read; None: it is not merely too short."""
    try:
        with file.open("rb") as opened:
            header_bytes = int.from_bytes(opened.read(8), "little")
            entries = json.loads(opened.read(min(header_bytes, MAX_HEADER_BYTES)))
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
        size, whole_size = file.stat().st_size, 8 + header_bytes + max(ends, default=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return None  # not a header: the caller reports a damaged file
    return f"is damaged: it is truncated, {size:,} of {whole_size:,} bytes" if size < whole_size else None


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
