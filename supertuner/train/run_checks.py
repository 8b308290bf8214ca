"""What can be refused before anything is staged, encoded or loaded: the device, backends, and settings of experts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from supertuner.config.families import expert_names
from supertuner.config.settings.run_config import RunConfig
from supertuner.config.sources import alloc_conf
from supertuner.config.sources.launcher import SINGLE_PROCESS_ENVIRONMENT, LauncherEnvironment
from supertuner.core.errors import ModelError, TrainError
from supertuner.core.events import DecisionEvent, Sink, WarningEvent
from supertuner.core.host import HostFacts
from supertuner.models import loading
from supertuner.models.adapters import attach as adapters
from supertuner.models.adapters.layers import AdapterSize
from supertuner.models.attention import require_backend, require_backend_support
from supertuner.models.block_compilation import check_compiler
from supertuner.models.quantization import check_quantization
from supertuner.models.spec import Expert, Family, ModelDescription
from supertuner.optim.optimizer_registry import learning_rate_for
from supertuner.step.precision import ComputePrecision
from supertuner.train.export.adapter_export import require_exportable
from supertuner.train.export.adapter_init import check_initial_adapters
from supertuner.train.export.export import OWN_FORMAT


def select_device(
    setting: str, launch_env: LauncherEnvironment = SINGLE_PROCESS_ENVIRONMENT, host: HostFacts | None = None
) -> torch.device:
    """The device that `train.device` names; on a node with several ranks, each uses the GPU of its local rank.

    TrainError if the device cannot be used, or if "auto" would use the CPU only because torch is a CPU build.
    """
    has_driver = ((host or HostFacts()).root / "proc/driver/nvidia/version").exists()
    if setting == "auto" and has_driver and torch.version.cuda is None and torch.version.hip is None:
        raise TrainError(
            f"torch {torch.__version__} is a CPU build, and this machine has an NVIDIA GPU; install a CUDA build with "
            '`make setup TORCH=cuda`, or set train.device to "cpu" to train on the CPU'
        )
    name = setting if setting != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if launch_env.local_world_size > 1 and name == "cuda":
        name = f"cuda:{launch_env.local_rank}"
    elif launch_env.local_world_size > 1 and name.startswith("cuda:"):
        raise TrainError(
            f'train.device is "{setting}", and {launch_env.local_world_size} processes of this node would share it; '
            'use "cuda": each process then uses the GPU of its local rank'
        )
    try:
        device = torch.empty(1, device=torch.device(name)).device  # with its index, as tensors report it
    except ValueError as error:  # torch parses its allocator variables when CUDA starts, and reports errors in them
        where = " or ".join(alloc_conf.ALLOC_CONF_VARIABLES)
        raise TrainError(
            f"torch refuses its allocator settings: {str(error).splitlines()[0]} Correct {where}"
        ) from error
    except (RuntimeError, AssertionError) as error:  # torch raises these for an unknown, absent or unsupported device
        reason = str(error).splitlines()[0]
        remedy = 'use "cpu", or see `supertuner doctor`' if setting == "auto" else 'use "auto"'
        raise TrainError(f'train.device is "{setting}", and {name} cannot be used here: {reason}; {remedy}') from error
    return device


def device_reason(setting: str) -> str:
    """Why `select_device` chose as it did, for the decision that is reported."""
    if setting != "auto":
        return "as configured"
    return "there is a GPU" if torch.cuda.is_available() else "there is no GPU that torch can use"


def require_expert_settings(config: RunConfig, model: ModelDescription, sink: Sink) -> None:
    """TrainError for adapter settings of an expert that this model lacks; a warning for optimizer settings of one.

    Settings that no model of the family uses were reported when the configuration was read.
    """
    warned_fields = {remark.field for remark in config.warnings()}
    for expert_name in set(expert_names()) - {expert.name for expert in model.experts}:
        reason = f"{model.title} has {' and '.join(expert.name for expert in model.experts)}"
        if expert_name in config.adapter.model_fields_set:
            raise TrainError(f"adapter.{expert_name} is set, and {reason}; put it into adapter itself")
        for name in sorted(config.optimizer.model_fields_set):
            if name.startswith(f"{expert_name}_") and f"optimizer.{name}" not in warned_fields:
                sink.emit(WarningEvent(f"optimizer.{name}", f"has no effect: {reason}"))


def require_backends(config: RunConfig, experts: tuple[Expert, ...], precision: ComputePrecision) -> None:
    """ModelError or TrainError if attention backend, quantization or compiler cannot be used on this device."""
    for expert in experts:
        learning_rate_for(config.optimizer, expert.name)
    require_backend(config.model.attention, precision.device)
    if config.model.base_weights != "as_computed":
        check_quantization(config.model.base_weights, precision.device, precision.dtype)
    if config.model.compile:
        check_compiler(precision.device)


def export_decision(config: RunConfig) -> DecisionEvent:
    """When the run exports, and why."""
    if config.exports.when is not None:
        reason = "as configured"
    elif config.exports_when == "end":
        reason = "whole models are large; set it to export them with each checkpoint"
    else:
        reason = "so that every checkpoint can be tried in other programs"
    return DecisionEvent("exports.when", config.exports_when, reason)


def require_export_format(program: str, family: Family, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """TrainError if an adapter with these tensors cannot be written for `program`, one of `exports.formats`."""
    if program == OWN_FORMAT:
        return
    try:
        require_exportable(shapes, program, family.name)
    except ModelError as error:
        raise TrainError(f'exports.formats: the adapter cannot be written for "{program}": {error}') from error


def check_layers(config: RunConfig, family: Family, expert: Expert, module: nn.Module) -> dict[str, AdapterSize]:
    """The layers of an expert that get an adapter; none if all weights are trained. `module` is on the meta device.

    ModelError if the attention backend does not suit the module, or if a target matches no layer.
    """
    require_backend_support(module, config.model.attention)
    if config.adapter.type == "full":
        return {}
    settings = adapters.settings_for_expert(config.adapter, expert.name)
    targets = adapters.resolve_targets(settings, family.target_presets)
    return adapters.select_layers(module, settings, targets, expert.name)


def check_against_meta_modules(
    config: RunConfig, family: Family, model: ModelDescription, experts: tuple[Expert, ...]
) -> dict[str, str]:
    """Check settings and adapter files against the model's layers, on meta tensors.

    Returns the digest of each file that an adapter starts from or is trained on top of, by `expert: setting`.
    """
    digests: dict[str, str] = {}
    converts = config.exports_when != "never" and config.exports.formats != (OWN_FORMAT,)
    for expert in experts:
        module = loading.build_meta_module(model, expert.component)
        check_layers(config, family, expert, module)
        if converts and config.adapter.type != "full":
            settings = adapters.settings_for_expert(config.adapter, expert.name)
            targets = adapters.resolve_targets(settings, family.target_presets)
            shapes = adapters.export_shapes(module, settings, targets, family.export_prefix[expert.component])
            for program in config.exports.formats:
                require_export_format(program, family, shapes)
        file_digests = check_initial_adapters(config, family, model, expert)
        digests |= {f"{expert.name}: {setting}": digest for setting, digest in file_digests.items()}
    return digests
