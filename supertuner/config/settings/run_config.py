"""RunConfig, the root of the configuration, with the checks between its blocks, and its JSON Schema."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from supertuner.config.families import (
    ALL_EXPERTS,
    FAMILIES,
    describe_experts,
    expert_names,
    experts_of,
    target_presets_of,
)
from supertuner.config.settings.block import SettingsBlock, SettingsIssue
from supertuner.config.settings.cache import ArenaSettings, CacheConfig
from supertuner.config.settings.data import DatasetSettings, LoaderSettings
from supertuner.config.settings.memory import Gh200Optimizations, MemorySettings
from supertuner.config.settings.model import AdapterSettings, ModelSettings, ObjectiveSettings
from supertuner.config.settings.optim import OptimizerSettings
from supertuner.config.settings.parallel import ParallelSettings
from supertuner.config.settings.plan import ForecastSettings, PlanSettings
from supertuner.config.settings.train import (
    CheckpointSettings,
    ExportSettings,
    ReportSettings,
    RunSettings,
    TrainSettings,
)
from supertuner.config.settings.validation import ValidationSettings

USED_BY_PUSH_COMMAND: Final = ("hub_private", "license", "trigger_word")
"""Settings of exports that `supertuner adapter push` uses, also for a run that exports nothing itself."""


class RunConfig(SettingsBlock):
    """All settings of a run."""

    run: RunSettings = RunSettings()
    """Name, folder and seed of the run."""
    model: ModelSettings = ModelSettings()
    """The model."""
    adapter: AdapterSettings = AdapterSettings()
    """What is trained: an adapter, or all weights."""
    objective: ObjectiveSettings = ObjectiveSettings()
    """The training objective: noise levels, loss and loss weights."""
    datasets: tuple[DatasetSettings, ...] = ()
    """The training data."""
    arena: ArenaSettings = ArenaSettings()
    """Arenas: memory for staged data that all processes of a node share."""
    loader: LoaderSettings = LoaderSettings()
    """The data loader."""
    cache_config: CacheConfig = CacheConfig()
    """Caches of encoded samples and captions."""
    gh200_optimizations: Gh200Optimizations = Gh200Optimizations()
    """Residency hints and the batch-size ramp."""
    memory: MemorySettings = MemorySettings()
    """What happens when GPU memory is full."""
    forecast: ForecastSettings = ForecastSettings()
    """The forecast of memory before a run starts."""
    plan: PlanSettings = PlanSettings()
    """What moves between GPU and host memory while training."""
    parallel: ParallelSettings = ParallelSettings()
    """Distributed training."""
    train: TrainSettings = TrainSettings()
    """The training loop."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """The optimizer and its learning rate."""
    checkpoints: CheckpointSettings = CheckpointSettings()
    """When checkpoints are saved, and which one is resumed."""
    exports: ExportSettings = ExportSettings()
    """When the trained weights are written for other programs, and with which names."""
    validation: ValidationSettings = ValidationSettings()
    """Samples and the held-out loss."""
    report: ReportSettings = ReportSettings()
    """Where figures are reported during training."""

    @property
    def exports_when(self) -> str:
        """`exports.when`, or its default for what is trained: whole models are large."""
        return self.exports.when or ("end" if self.adapter.type == "full" else "checkpoints")

    @property
    def has_weight_average(self) -> bool:
        """Whether the run averages its weights, by EMA or by its optimizer."""
        return self.train.ema_decay is not None or self.optimizer.name == "schedule_free"

    @property
    def exports_both_weights(self) -> bool:
        """Whether averaged and trained weights are exported."""
        return self.exports.weights == "both" and self.has_weight_average

    @property
    def push_repository(self) -> str | None:
        """The repository on the hub that the run is pushed to; None: it is not pushed."""
        has_adapter = self.adapter.type != "full" and self.exports_when != "never"
        return self.exports.push_to_hub if has_adapter else None

    def contradictions(self) -> Iterator[SettingsIssue]:
        seen = Counter(dataset.id for dataset in self.datasets if dataset.id)
        for index, dataset in enumerate(self.datasets):
            if seen[dataset.id] > 1:
                yield SettingsIssue(
                    f"datasets[{index}].id",
                    f'"{dataset.id}" is the id of {seen[dataset.id]} datasets; ids must be unique',
                )
        if self.datasets and all(dataset.held_out for dataset in self.datasets):
            yield SettingsIssue("datasets[0].held_out", "every dataset is held out: there is no training data")
        yield from self._adapter_contradictions()
        yield from self._ramp_contradictions()

    def warnings(self) -> Iterator[SettingsIssue]:
        if self.model.family is None and "validation" in self.model_fields_set:
            yield SettingsIssue("validation", "has no effect without a model: set model.family and model.path")
        if self.train.ema_decay is not None and self.optimizer.name == "schedule_free":
            message = "schedule_free averages the weights too; two averages together react slowly"
            yield SettingsIssue("train.ema_decay", message)
        yield from self._export_warnings()
        yield from self._untrained_expert_warnings()
        family = self.model.family
        if "guidance" in self.objective.model_fields_set and family and not FAMILIES[family].guidance_input:
            message = f'has no effect: guidance is not an input of models of family "{family}"'
            yield SettingsIssue("objective.guidance", message)
        caches = self.cache_config
        for index, dataset in enumerate(self.datasets):
            if (
                caches.vae_cache_type == caches.text_cache_type == "none"
                and dataset.augmentations_cache_mode is not None
            ):
                yield SettingsIssue(
                    f"datasets[{index}].augmentations_cache_mode", "has no effect: cache_config turns all caches off"
                )

    def _export_warnings(self) -> Iterator[SettingsIssue]:
        if self.exports.weights != "averaged" and not self.has_weight_average:
            message = "has no effect: the run averages no weights (train.ema_decay is not set)"
            yield SettingsIssue("exports.weights", message)
        if self.adapter.type == "full" and "formats" in self.exports.model_fields_set:
            message = "has no effect: all weights are trained, and are exported as folders for diffusers"
            yield SettingsIssue("exports.formats", message)
        if self.adapter.type == "full" and self.exports.push_to_hub is not None:
            message = "has no effect: all weights are trained; push the exported folders with `hf upload`"
            yield SettingsIssue("exports.push_to_hub", message)
        if self.exports.when == "never":
            for name in sorted(self.exports.model_fields_set - {"when", *USED_BY_PUSH_COMMAND}):
                yield SettingsIssue(f"exports.{name}", 'has no effect: exports.when is "never"')

    def _untrained_expert_warnings(self) -> Iterator[SettingsIssue]:
        """Warnings for settings of experts that do not exist or are not trained."""
        family_experts = experts_of(self.model.family)
        for expert in expert_names():
            if expert not in family_experts:
                reason = describe_experts(self.model.family)
            elif self.model.experts not in (ALL_EXPERTS, expert):
                reason = "this expert is not trained"
                if expert in self.adapter.model_fields_set:
                    message = f'has no effect: {reason}, model.experts is "{self.model.experts}"'
                    yield SettingsIssue(f"adapter.{expert}", message)
            else:
                continue
            for name in sorted(self.optimizer.model_fields_set):
                if name.startswith(f"{expert}_"):
                    yield SettingsIssue(f"optimizer.{name}", f"has no effect: {reason}")

    def _adapter_contradictions(self) -> Iterator[SettingsIssue]:
        base, kind = self.model.base_weights, self.adapter.type
        if kind in ("full", "diff") and base != "as_computed":
            trained_weights = "all weights" if kind == "full" else "the weights of its targets"
            message = f'"{base}" needs frozen weights, but adapter.type "{kind}" trains {trained_weights}'
            yield SettingsIssue("model.base_weights", message, ("adapter.type",))
        if self.adapter.dora and base != "as_computed":
            message = f'"{base}" cannot be used with adapter.dora, which needs the original weights'
            yield SettingsIssue("model.base_weights", message, ("adapter.dora",))
        yield from self._unknown_target_presets()
        for expert in expert_names():
            if expert in self.adapter.model_fields_set and expert not in experts_of(self.model.family):
                message = f"does not exist: {describe_experts(self.model.family)}"
                yield SettingsIssue(f"adapter.{expert}", message, ("model.family",))

    def _unknown_target_presets(self) -> Iterator[SettingsIssue]:
        presets = target_presets_of(self.model.family)
        targets = {"adapter": self.adapter.targets}
        targets |= {f"adapter.{name}": self.adapter.for_expert(name).targets or () for name in expert_names()}
        for path, value in targets.items():
            if isinstance(value, str) and value not in presets:
                allowed = ", ".join(f'"{preset}"' for preset in presets)
                message = f'"{value}" is not a preset; use {allowed}, or a list of suffixes of module names'
                yield SettingsIssue(f"{path}.targets", message, ("model.family",))

    def _ramp_contradictions(self) -> Iterator[SettingsIssue]:
        ramp = self.gh200_optimizations
        start, constant = (
            ramp.initial_effective_batch_size,
            self.train.batch_size * self.train.gradient_accumulation_steps,
        )
        if ramp.enable_batch_size_rampup and start and ramp.target_effective_batch_size is None and start > constant:
            yield SettingsIssue(
                "gh200_optimizations.initial_effective_batch_size",
                f"{start} is above the end of the ramp, train.batch_size × train.gradient_accumulation_steps = "
                f"{constant}; set target_effective_batch_size",
                (
                    "train.batch_size",
                    "train.gradient_accumulation_steps",
                    "gh200_optimizations.target_effective_batch_size",
                ),
            )


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a configuration file, for editors: each setting with its description, type and bounds.

    It covers SuperTuner's own names only, not the dialects', so that editors suggest our names.
    """
    schema = RunConfig.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["properties"]["$schema"] = {"type": "string", "description": "Where editors find this schema."}
    return {**_without_titles(schema), "title": "SuperTuner configuration"}


def json_schema_text() -> str:
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def _without_titles(node: Any) -> Any:
    """`node` without the titles that pydantic derives from names; they add no information."""
    if isinstance(node, dict):
        return {
            name: _without_titles(inner)
            for name, inner in node.items()
            if name != "title" or not isinstance(inner, str)
        }
    return [_without_titles(inner) for inner in node] if isinstance(node, list) else node
