"""Traces of a run's phases from a cache: each step that differs in memory or work is traced once.

A cache key holds the settings that change a tensor or an operator, the configs of the modules, the shape of the batch
and the device. What changes only values (learning rates, seeds, weight files) is not part of the key, so two experts
with equal modules share a trace.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from supertuner.config.settings.model import ExpertAdapterSettings
from supertuner.config.settings.run_config import RunConfig
from supertuner.core.types import JSON
from supertuner.models.adapters import attach as adapters
from supertuner.models.spec import Expert, Family, ModelDescription
from supertuner.plan.trace.encoder_shapes import BatchShape
from supertuner.plan.trace.execution_trace import ExecutionTrace
from supertuner.plan.trace.inference_phases import trace_media_encoding, trace_sampling, trace_text_encoding
from supertuner.plan.trace.loading_phase import trace_loading
from supertuner.plan.trace.recorder import TracedDevice
from supertuner.plan.trace.trace_store import TraceCache
from supertuner.plan.trace.trace_training_step import trace_training_step, with_checkpointing

ADAPTER_FILES = {"start_from", "frozen"}
"""Adapter settings that are not part of a key: their values do not change the trace."""


@dataclass(frozen=True, eq=False, slots=True)
class CachedTraces:
    """The traces of one configured model on one kind of device.

    `label` arguments are for people: they name the shape in the progress line while it is traced.
    """

    cache: TraceCache
    config: RunConfig
    family: Family
    model: ModelDescription
    device: TracedDevice

    def training(
        self, expert: Expert, shape: BatchShape, checkpointing: bool = False, micro_batches: int = 1, label: str = ""
    ) -> ExecutionTrace:
        """One optimizer step of `expert`. `checkpointing` replaces `train.gradient_checkpointing`."""
        config = with_checkpointing(self.config, checkpointing)
        description = {
            **self._phase_key("train"),
            **self._expert_key(expert),
            "shape": str(shape),
            "checkpointing": config.train.gradient_checkpointing,
            "micro_batches": micro_batches,
            "objective": config.objective.model_dump(mode="json", exclude={"guidance"}),  # a value, no tensor more
            "max_grad_norm": config.train.max_grad_norm is not None,
            "max_grad_value": config.train.max_grad_value is not None,
        }
        trace = self.cache.get_or_create(
            description,
            lambda: trace_training_step(
                config, self.family, self.model, expert, shape, micro_batches=micro_batches, device=self.device
            ),
            f"a step of {expert.name}{label and ' with ' + label}",
        )
        return replace(trace, phase=f"train {expert.name}")

    def loading(self, expert: Expert) -> ExecutionTrace:
        """Copying an expert to the device and quantizing it."""
        config, model = self.config, self.model
        description = {
            **self._phase_key("load"),
            "config": _config_key(model.configs[expert.component]),
            "class": str(model.configs[""][expert.component]),
            "all_weights": config.adapter.type == "full",
            "base_weights": config.model.base_weights,
            "precision": config.train.mixed_precision,
        }
        return self.cache.get_or_create(
            description,
            lambda: trace_loading(config, self.family, model, expert, device=self.device),
            f"the loading of {expert.name}",
        )

    def media(self, media_shape: tuple[int, ...], label: str = "a sample") -> ExecutionTrace:
        """Encoding one sample of this shape (CHW or CFHW)."""
        description = {
            **self._phase_key("media"),
            "config": _config_key(self.model.configs["vae"]),
            "shape": list(media_shape),
            "conditioned": self.model.needs_first_frame,
        }
        return self.cache.get_or_create(
            description,
            lambda: trace_media_encoding(self.family, self.model, media_shape, device=self.device),
            f"the encoding of {label}",
        )

    def text(self, reference_shape: tuple[int, ...] | None = None) -> ExecutionTrace:
        """Encoding one caption. `reference_shape`: of the image that an editing model receives with it."""
        description = {
            **self._phase_key("text"),
            "configs": self._text_encoder_key(),
            "precision": self.config.train.mixed_precision,
            "picture": None if reference_shape is None else list(reference_shape),
            "tokens": self.model.source.assumed_caption_tokens,
        }
        return self.cache.get_or_create(
            description,
            lambda: trace_text_encoding(
                self.config, self.family, self.model, reference_shape=reference_shape, device=self.device
            ),
            "the encoding of a caption",
        )

    def sampling(self, shape: BatchShape, label: str = "") -> ExecutionTrace:
        """Generating one sample at a validation."""
        description = {
            **self._phase_key("sample"),
            "experts": [self._expert_key(expert) for expert in self.model.experts],
            "trained": self.config.model.experts,
            "configs": self._text_encoder_key(),
            "vae": _config_key(self.model.configs["vae"]),
            "shape": str(shape),
            "guided": self.config.validation.guidance_scale > 1,
        }
        return self.cache.get_or_create(
            description,
            lambda: trace_sampling(self.config, self.family, self.model, shape, device=self.device),
            f"a sample{label and ' of ' + label}",
        )

    def _phase_key(self, name: str) -> dict[str, JSON]:
        return {"phase": name, "family": self.family.name, "device": repr(self.device)}

    def _expert_key(self, expert: Expert) -> dict[str, JSON]:
        """What is trained of an expert, and how."""
        config, model = self.config, self.model
        settings = adapters.settings_for_expert(config.adapter, expert.name)
        resolved = {name for name, value in settings if isinstance(value, ExpertAdapterSettings)}
        index = {key: value for key, value in model.configs[""].items() if not isinstance(value, list)}
        return {
            "config": _config_key(model.configs[expert.component]),
            "class": str(model.configs[""][expert.component]),
            "index": _config_key(index),
            "adapter": settings.model_dump(mode="json", exclude=ADAPTER_FILES | resolved),
            "base_weights": config.model.base_weights,
            "left_out": [config.model.compile, config.model.attention],
            "precision": config.train.mixed_precision,
            "optimizer": [config.optimizer.name, config.optimizer.weight_decay],
            "averaged": config.train.ema_decay is not None,
            "prior": any(dataset.prior for dataset in config.datasets),
            "inputs": [model.needs_first_frame, model.edits_images, model.micro_conditioning, model.prediction],
        }

    def _text_encoder_key(self) -> dict[str, JSON]:
        configs = self.model.configs
        return {part: _config_key(configs[part]) for part in configs if part.startswith("text_encoder")}


def _config_key(config: Any) -> JSON:
    """A module's config as it stands in its file, without the path that it was loaded from."""
    return {str(key): str(value) for key, value in config.items() if not str(key).startswith("_name_or_path")}
