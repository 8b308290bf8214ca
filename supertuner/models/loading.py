"""Parts of a pipeline from a folder: frozen, whole, aligned, and made without using up anybody's random numbers."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from supertuner.core.errors import ModelError
from supertuner.models import hollow
from supertuner.models.quiet import quietly
from supertuner.models.reading import folder_of, weights_of
from supertuner.models.spec import Expert, Model

LIBRARIES: Final = ("diffusers", "transformers")
"""Where classes of parts may come from: an index can name any module, and importing one runs its code."""

SCALES: Final = (".scale_weight", ".weight_scale", ".scale_input", "scaled_fp8")
"""Names of what other programs store beside weights that they scaled to fit 8 bits."""


def denoiser(model: Model, expert: Expert, dtype: torch.dtype) -> nn.Module:
    """An expert's module."""
    return module(model, expert.part, dtype)


def module(model: Model, part: str, dtype: torch.dtype) -> nn.Module:
    """A part with weights: on the CPU, in eval mode, no gradient required.

    Modules that the class itself keeps in fp32 (norms, time embeddings) stay so whatever `dtype` is.
    """
    if model.source.hollow:
        return hollow.stand_in(lambda: skeleton(model, part), dtype)
    kind = _class_of(model, part)
    folder = folder_of(model.source, (part,))
    single = model.source.single_files.get(part)
    for file in weights_of(model.source, folder, part):
        _check_whole(file)
    with quietly(), torch.random.fork_rng(devices=[]):
        try:
            if single is not None:
                loaded = _from_single_file(kind, single, folder, part, dtype)
            else:
                loaded = _from_folder(kind, model, folder, part, dtype)
        except (OSError, ValueError, TypeError, AttributeError, RuntimeError, KeyError, ImportError) as error:
            where = single or folder / part  # a config of another class, or of nonsense, fails in any of these ways
            raise ModelError(f"{where} cannot be loaded as {kind.__name__}: {_first_line(error)}") from error
    align(loaded)
    return loaded.eval().requires_grad_(False)


def skeleton(model: Model, part: str) -> nn.Module:
    """A part without its weights: names and shapes of layers, in no memory, in a moment."""
    kind = _class_of(model, part)
    with quietly(), torch.device("meta"):
        try:
            made = _from_config(kind, dict(model.configs[part]))
        except (ValueError, TypeError, AttributeError, RuntimeError, KeyError) as error:
            raise ModelError(
                f"{model.source.path}: the config of {part} describes no {kind.__name__}: {_first_line(error)}"
            ) from error
    assert isinstance(made, nn.Module)
    return made


def plain(model: Model, part: str) -> Any:
    """A part without weights: a tokenizer or a scheduler."""
    if model.source.hollow:
        return hollow.Wordless(model.source.hollow_tokens)
    kind = _class_of(model, part)
    folder = folder_of(model.source, (part,))
    with quietly():
        try:
            return kind.from_pretrained(str(folder), subfolder=part, local_files_only=True)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ModelError(f"{folder / part} cannot be loaded as {kind.__name__}: {_first_line(error)}") from error


def align(loaded: nn.Module) -> None:
    """Give each tensor memory of its own, one after the other, so that only one is held twice.

    Memory mapped from a .safetensors file begins anywhere, and CPU kernels round differently on unaligned data: the
    same weights would give results that differ in the last bits from one load to the next.
    """
    for tensor in (*loaded.parameters(), *loaded.buffers()):
        tensor.data = tensor.data.clone()


def _class_of(model: Model, part: str) -> Any:
    """The class that the pipeline's index names for a part."""
    library, name = (str(one) for one in model.configs[""][part])  # type: ignore[attr-defined]  # checked by read_parts
    if library not in LIBRARIES:
        raise ModelError(f"{model.source.path}: its {part} is code of its own ({library}), which is not run")
    found = getattr(import_module(library), name, None)
    if found is None:
        raise ModelError(f"{model.source.path}: its {part} is a {name}, which the installed {library} does not have")
    return found


def _from_config(kind: Any, config: dict[str, Any]) -> Any:
    """Each library has its own way."""
    if kind.__module__.startswith("diffusers."):
        return kind.from_config(config)
    return kind(kind.config_class.from_dict(config))


def _from_folder(kind: Any, model: Model, folder: Path, part: str, dtype: torch.dtype) -> nn.Module:
    # Each library has an older name for the other's argument, and takes an unknown one without a word.
    precision = {"torch_dtype" if kind.__module__.startswith("diffusers.") else "dtype": dtype}
    loaded, report = kind.from_pretrained(
        str(folder),
        subfolder=part,
        variant=model.source.variant,
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
        **precision,
    )
    _require_complete(f"{folder / part}", sorted(report["missing_keys"]))
    assert isinstance(loaded, nn.Module)
    return loaded


def _from_single_file(kind: Any, file: Path, folder: Path, part: str, dtype: torch.dtype) -> nn.Module:
    """Weights in diffusers' names or in those of the model's authors; the config is the pipeline's."""
    if not hasattr(kind, "from_single_file"):
        raise ModelError(f"{file}: diffusers cannot read a {kind.__name__} from a single file; use a folder")
    try:
        loaded = kind.from_single_file(str(file), config=str(folder), subfolder=part, local_files_only=True)
    except (
        NotImplementedError
    ) as error:  # diffusers moves the module at the end, and what was not in the file cannot be
        raise ModelError(f"{file} lacks tensors that {folder / part} asks for; it is not of this model") from error
    assert isinstance(loaded, nn.Module)
    kept = tuple(getattr(kind, "_keep_in_fp32_modules", None) or ())
    for name, tensor in (*loaded.named_parameters(), *loaded.named_buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if set(kept) & set(name.split(".")) else dtype)
    return loaded


def _require_complete(where: str, missing: list[str]) -> None:
    if missing:
        some = ", ".join(missing[:3]) + (" …" if len(missing) > 3 else "")
        raise ModelError(f"{where} lacks {len(missing)} tensors that its config asks for ({some}); fetch it again")


def _check_whole(file: Path) -> None:
    """A truncated or foreign file is found by its header, before the first weight is read."""
    try:
        with safe_open(file, framework="pt") as opened:
            names = list(opened.keys())
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is damaged ({_first_line(error)}); fetch it again") from error
    if scale := next((name for name in names if name.endswith(SCALES)), None):
        raise ModelError(
            f"{file} holds weights in 8 bits with scales beside them ({scale}), which are not applied when it is "
            "loaded; use the file in bf16 or fp16, and model.base_weights to keep it in 8 bits"
        )


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
