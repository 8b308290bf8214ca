"""Parts of a pipeline from a folder: frozen, whole, aligned, and made without using up anybody's random numbers."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from supertuner.core.errors import ModelError
from supertuner.models.library_logging import quiet_libraries
from supertuner.models.meta_modules import PlaceholderTokenizer, build_without_weights
from supertuner.models.pipeline_files import pipeline_folder, weight_files
from supertuner.models.spec import Expert, ModelDescription

TRUSTED_LIBRARIES: Final = ("diffusers", "transformers")
"""Where classes of parts may come from: an index can name any module, and importing one runs its code."""

SCALE_SUFFIXES: Final = (".scale_weight", ".weight_scale", ".scale_input", "scaled_fp8")
"""Names of what other programs store beside weights that they scaled to fit 8 bits."""


def load_denoiser(model: ModelDescription, expert: Expert, dtype: torch.dtype) -> nn.Module:
    """An expert's module."""
    return load_module(model, expert.component, dtype)


def load_module(model: ModelDescription, component: str, dtype: torch.dtype) -> nn.Module:
    """A part with weights: on the CPU, in eval mode, no gradient required.

    Modules that the class itself keeps in fp32 (norms, time embeddings) stay so whatever `dtype` is.
    """
    if model.source.without_weights:
        return build_without_weights(lambda: build_meta_module(model, component), dtype)
    component_class = _component_class(model, component)
    folder = pipeline_folder(model.source, (component,))
    single_file = model.source.single_files.get(component)
    for file in weight_files(model.source, folder, component):
        _check_weight_file(file)
    with quiet_libraries(), torch.random.fork_rng(devices=[]):
        try:
            if single_file is not None:
                loaded = _from_single_file(component_class, single_file, folder, component, dtype)
            else:
                loaded = _from_folder(component_class, model, folder, component, dtype)
        except (OSError, ValueError, TypeError, AttributeError, RuntimeError, KeyError, ImportError) as error:
            where = (
                single_file or folder / component
            )  # a config of another class, or of nonsense, fails in any of these ways
            raise ModelError(f"{where} cannot be loaded as {component_class.__name__}: {_first_line(error)}") from error
    align_tensors(loaded)
    return loaded.eval().requires_grad_(False)


def build_meta_module(model: ModelDescription, component: str) -> nn.Module:
    """A part without its weights: names and shapes of layers, in no memory, in a moment."""
    component_class = _component_class(model, component)
    with quiet_libraries(), torch.device("meta"):
        try:
            meta_module = _from_config(component_class, dict(model.configs[component]))
        except (ValueError, TypeError, AttributeError, RuntimeError, KeyError) as error:
            raise ModelError(
                f"{model.source.path}: the config of {component} describes no {component_class.__name__}: {_first_line(error)}"
            ) from error
    assert isinstance(meta_module, nn.Module)
    return meta_module


def load_tokenizer_or_scheduler(model: ModelDescription, component: str) -> Any:
    """A part without weights: a tokenizer or a scheduler."""
    if model.source.without_weights:
        return PlaceholderTokenizer(model.source.assumed_caption_tokens)
    component_class = _component_class(model, component)
    folder = pipeline_folder(model.source, (component,))
    with quiet_libraries():
        try:
            return component_class.from_pretrained(str(folder), subfolder=component, local_files_only=True)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ModelError(
                f"{folder / component} cannot be loaded as {component_class.__name__}: {_first_line(error)}"
            ) from error


def align_tensors(module_to_align: nn.Module) -> None:
    """Give each tensor memory of its own, one after the other, so that only one is held twice.

    Memory mapped from a .safetensors file begins anywhere, and CPU kernels round differently on unaligned data: the
    same weights would give results that differ in the last bits from one load to the next.
    """
    for tensor in (*module_to_align.parameters(), *module_to_align.buffers()):
        tensor.data = tensor.data.clone()


def _component_class(model: ModelDescription, component: str) -> Any:
    """The class that the pipeline's index names for a part."""
    library, name = (str(one) for one in model.configs[""][component])  # type: ignore[attr-defined]  # checked by read_parts
    if library not in TRUSTED_LIBRARIES:
        raise ModelError(f"{model.source.path}: its {component} is code of its own ({library}), which is not run")
    component_class = getattr(import_module(library), name, None)
    if component_class is None:
        raise ModelError(
            f"{model.source.path}: its {component} is a {name}, which the installed {library} does not have"
        )
    return component_class


def _from_config(component_class: Any, config: dict[str, Any]) -> Any:
    """Each library has its own way."""
    if component_class.__module__.startswith("diffusers."):
        return component_class.from_config(config)
    return component_class(component_class.config_class.from_dict(config))


def _from_folder(
    component_class: Any, model: ModelDescription, folder: Path, component: str, dtype: torch.dtype
) -> nn.Module:
    # Each library has an older name for the other's argument, and takes an unknown one without a word.
    dtype_argument = {"torch_dtype" if component_class.__module__.startswith("diffusers.") else "dtype": dtype}
    loaded, report = component_class.from_pretrained(
        str(folder),
        subfolder=component,
        variant=model.source.variant,
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
        **dtype_argument,
    )
    _require_complete(f"{folder / component}", sorted(report["missing_keys"]))
    assert isinstance(loaded, nn.Module)
    return loaded


def _from_single_file(component_class: Any, file: Path, folder: Path, component: str, dtype: torch.dtype) -> nn.Module:
    """Weights in diffusers' names or in those of the model's authors; the config is the pipeline's."""
    if not hasattr(component_class, "from_single_file"):
        raise ModelError(f"{file}: diffusers cannot read a {component_class.__name__} from a single file; use a folder")
    try:
        loaded = component_class.from_single_file(
            str(file), config=str(folder), subfolder=component, local_files_only=True
        )
    except (
        NotImplementedError
    ) as error:  # diffusers moves the module at the end, and what was not in the file cannot be
        raise ModelError(f"{file} lacks tensors that {folder / component} asks for; it is not of this model") from error
    assert isinstance(loaded, nn.Module)
    fp32_names = tuple(getattr(component_class, "_keep_in_fp32_modules", None) or ())
    for name, tensor in (*loaded.named_parameters(), *loaded.named_buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if set(fp32_names) & set(name.split(".")) else dtype)
    return loaded


def _require_complete(location: str, missing: list[str]) -> None:
    if missing:
        examples = ", ".join(missing[:3]) + (" …" if len(missing) > 3 else "")
        raise ModelError(
            f"{location} lacks {len(missing)} tensors that its config asks for ({examples}); fetch it again"
        )


def _check_weight_file(file: Path) -> None:
    """A truncated or foreign file is found by its header, before the first weight is read."""
    try:
        with safe_open(file, framework="pt") as weights:
            names = list(weights.keys())
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is damaged ({_first_line(error)}); fetch it again") from error
    if scale := next((name for name in names if name.endswith(SCALE_SUFFIXES)), None):
        raise ModelError(
            f"{file} holds weights in 8 bits with scales beside them ({scale}), which are not applied when it is "
            "loaded; use the file in bf16 or fp16, and model.base_weights to keep it in 8 bits"
        )


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
