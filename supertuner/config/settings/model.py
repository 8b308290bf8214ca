"""Settings of the model, the adapter and the training objective."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Field

from supertuner.config.families import ALL_EXPERTS, FAMILIES, describe_experts, expert_names, experts_of, later_experts
from supertuner.config.settings.block import SettingsBlock, SettingsIssue, name_or_folder, with_fields

_MODEL = name_or_folder("tiny")
_TARGETS = {"allowed": "the name of a preset in quotes, or a list of suffixes of module names"}

if TYPE_CHECKING:
    FamilyName: TypeAlias = str
    ExpertChoice: TypeAlias = str
else:
    FamilyName = Literal[tuple(FAMILIES)]
    ExpertChoice = Literal[ALL_EXPERTS, *expert_names()]
ModuleNames = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1, max_length=256)]


def single_file_setting(expert: str) -> str:
    """The setting with the weight file of an expert after the first."""
    return f"single_file_{expert}"


def _single_file_field(expert: str) -> tuple[Any, Any]:
    description = f"A .safetensors file that replaces the weights of the {expert.replace('_', '-')} expert."
    return Path | None, Field(default=None, description=description)


@with_fields({single_file_setting(expert): _single_file_field(expert) for expert in later_experts()})
class ModelSettings(SettingsBlock):
    family: FamilyName | None = None
    """Family of the model; required for training."""
    path: Annotated[str | None, Field(min_length=1, json_schema_extra=_MODEL)] = None
    """A folder with a diffusers pipeline, a name on the Hugging Face hub, or "tiny": a random model of a few hundred
    kilobytes, for trying out a configuration."""
    revision: Annotated[str | None, Field(min_length=1)] = None
    """Branch, tag or commit of a model on the hub. Unset: its main branch."""
    variant: Annotated[str | None, Field(min_length=1)] = None
    """Variant of the weight files of a pipeline, such as "fp16"."""
    single_file: Path | None = None
    """A .safetensors file that replaces the weights of the denoiser (with several experts: of the first one, which
    takes the highest noise levels)."""
    offline: bool = False
    """Use only files on this machine; make no network requests."""
    experts: ExpertChoice = ALL_EXPERTS
    """For a model with several experts: which of them are trained."""
    switch_boundary_every: Annotated[int, Field(ge=1)] = 1
    """For a model with several experts: optimizer steps after which training switches to the next expert."""
    attention: str = "native"
    """Attention backend of diffusers, such as "native", "flash", "_flash_3", "flex" or "xformers". Its availability is
    tested at the start."""
    base_weights: Literal["as_computed", "int8", "fp8"] = "as_computed"
    """Number format of frozen weights: that of the computation, or 8 bits (quantized by torchao)."""
    compile: bool = False
    """Compile the transformer blocks with torch.compile: a slower start, faster steps."""

    def contradictions(self) -> Iterator[SettingsIssue]:
        if self.path is not None and self.family is None:
            yield SettingsIssue("family", "is missing: a model needs both path and family", ("path",))
        experts, reason = experts_of(self.family), f"does not exist: {describe_experts(self.family)}"
        if self.experts not in (ALL_EXPERTS, *experts):
            yield SettingsIssue("experts", f'"{self.experts}" {reason}', ("family",))
        for name in self.single_files:
            if name not in ("single_file", *map(single_file_setting, experts)):
                yield SettingsIssue(name, f"{reason}; use single_file", ("family",))

    @property
    def single_files(self) -> dict[str, Path]:
        """The settings `single_file…` that are set, with their files."""
        names = ("single_file", *map(single_file_setting, later_experts()))
        return {name: file for name in names if (file := getattr(self, name)) is not None}

    def warnings(self) -> Iterator[SettingsIssue]:
        if "switch_boundary_every" in self.model_fields_set and (
            not experts_of(self.family) or self.experts != ALL_EXPERTS
        ):
            yield SettingsIssue("switch_boundary_every", "has no effect: only one expert is trained")
        if self.revision is not None and self.path is not None and (self.path == "tiny" or self.path.startswith("/")):
            yield SettingsIssue("revision", "has no effect: path is a model on this machine, not on the hub")
        if self.attention.lower().lstrip("_").startswith("sage"):
            yield SettingsIssue(
                "attention", f'"{self.attention}" computes no gradients, so training refuses it; use "native"'
            )


AdapterRank = Annotated[int, Field(ge=1, le=4096)]
AdapterAlpha = Annotated[float, Field(gt=0)]
AdapterTargets = Annotated[str | ModuleNames, Field(json_schema_extra=_TARGETS)]


class ModuleAdapterSettings(SettingsBlock):
    """Another rank or alpha for some layers of the adapter."""

    match: Annotated[str, Field(min_length=1)] = "*"
    """The layers: the name of a module or its last parts, with `*` for any characters, such as "ffn.net.2" or
    "blocks.1*.attn1.*". The first entry that matches a layer counts."""
    rank: AdapterRank | None = None
    """Rank of these layers. Unset: `adapter.rank`."""
    alpha: AdapterAlpha | None = None
    """Alpha of these layers. Unset: `adapter.alpha`; if that is also unset, their rank."""


class ExpertAdapterSettings(SettingsBlock):
    """Settings that differ for one expert."""

    rank: AdapterRank | None = None
    """Rank for this expert. Unset: `adapter.rank`."""
    alpha: AdapterAlpha | None = None
    """Alpha for this expert. Unset: `adapter.alpha`; if that is also unset, the rank."""
    targets: AdapterTargets | None = None
    """Target layers in this expert. Unset: `adapter.targets`."""
    start_from: Path | None = None
    """File with the initial values of this expert's adapter. Unset: `adapter.start_from`."""
    frozen: Path | None = None
    """File of a frozen adapter below this expert's adapter. Unset: `adapter.frozen`."""


def _expert_adapter_field(expert: str) -> tuple[Any, Any]:
    description = f"Settings that differ for the {expert.replace('_', '-')} expert."
    return ExpertAdapterSettings, Field(default=ExpertAdapterSettings(), description=description)


@with_fields({expert: _expert_adapter_field(expert) for expert in expert_names()})
class AdapterSettings(SettingsBlock):
    type: Literal["lora", "locon", "loha", "lokr", "diff", "full"] = "lora"
    """What is trained. "lora": a low-rank adapter (peft). "locon", "loha", "lokr": adapters of LyCORIS, low-rank, of
    Hadamard products, or of Kronecker products. "diff": the full weights of the targets, stored as a difference
    (LyCORIS). "full": all weights of the expert."""
    rank: AdapterRank = 16
    """Rank of the adapter."""
    alpha: AdapterAlpha | None = None
    """The adapter's output is scaled by alpha / rank. Unset: equal to the rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout probability of the adapter's inputs (with LyCORIS: of its outputs)."""
    targets: AdapterTargets = "attention"
    """Target layers of the adapter: a preset of the family ("attention", "attention_mlp", "all_linear"; for sdxl also
    "all_layers", which includes convolutions), or a list of suffixes of module names."""
    dora: bool = False
    """lora: train magnitude and direction of each row of a weight separately (DoRA)."""
    rslora: bool = False
    """Scale by alpha / √rank instead of alpha / rank, so that high ranks do not learn more slowly (rsLoRA)."""
    lokr_factor: Annotated[int, Field(ge=-1, le=4096)] = -1
    """lokr: size of the smaller Kronecker factor. -1: the factorization closest to square."""
    lokr_full_matrix: bool = False
    """lokr: full matrices for both factors, without a rank."""
    start_from: Path | None = None
    """A .safetensors file with the initial values of the adapter; any known naming scheme, the same type and the same
    ranks."""
    frozen: Path | None = None
    """A .safetensors file of an adapter that is added to the base weights and stays frozen; the new adapter is trained
    on top of it."""
    modules: Annotated[tuple[ModuleAdapterSettings, ...], Field(max_length=256)] = ()
    """Other ranks and alphas for some layers."""

    def for_expert(self, expert: str) -> ExpertAdapterSettings:
        """The settings that differ for this expert; none for the only expert of a model."""
        settings = getattr(self, expert) if expert in expert_names() else ExpertAdapterSettings()
        assert isinstance(settings, ExpertAdapterSettings)
        return settings

    def contradictions(self) -> Iterator[SettingsIssue]:
        if self.dora and self.type != "lora":
            yield SettingsIssue("dora", f'needs type: "lora", not "{self.type}"', ("type",))
        if self.lokr_factor == 0:
            yield SettingsIssue("lokr_factor", "is 0; it must be -1 or at least 1")

    def warnings(self) -> Iterator[SettingsIssue]:
        for name in _UNUSED_FIELDS_BY_TYPE.get(self.type, ()):
            if name in self.model_fields_set:
                yield SettingsIssue(name, f'has no effect with type: "{self.type}"')
        if self.type not in ("lokr", "full", "diff"):
            for name in ("lokr_factor", "lokr_full_matrix"):
                if name in self.model_fields_set:
                    yield SettingsIssue(name, 'has no effect without type: "lokr"')


_SIZE_FIELDS = ("rank", "alpha", "dropout", "rslora", "lokr_factor", "lokr_full_matrix", "modules")
_UNUSED_FIELDS_BY_TYPE = {"full": (*_SIZE_FIELDS, "targets", "start_from"), "diff": _SIZE_FIELDS}


DEFAULT_GUIDANCE = 1.0


class ObjectiveSettings(SettingsBlock):
    timesteps: Literal["uniform", "logit_normal"] | None = None
    """Distribution of noise levels. Unset: "uniform" for models that predict epsilon or v, as in their original
    training; "logit_normal" for flow matching."""
    logit_mean: float = 0.0
    """logit_normal: mean of the normal distribution whose logistic function is the noise level (0: clean, 1: noise);
    above 0: more noise. diffusers' training scripts have the opposite sign: their --logit_mean 1 is -1 here."""
    logit_std: Annotated[float, Field(gt=0)] = 1.0
    """logit_normal: standard deviation of that normal distribution."""
    shift: Annotated[float, Field(gt=0, le=1000)] | Literal["auto"] | None = None
    """Shift s of the noise levels t towards more noise, s·t / (1 + (s - 1)·t). "auto": s grows with the number of
    tokens. Unset: the shift of the model's scheduler."""
    weighting: Literal["none", "sigma_sqrt", "cosmap", "min_snr", "debiased"] = "none"
    """Weight of a sample's loss by its noise level; "min_snr" and "debiased": by its signal-to-noise ratio."""
    snr_gamma: Annotated[float, Field(gt=0)] = 5.0
    """min_snr: signal-to-noise ratio above which the weight decreases."""
    flow_snr: Literal["none", "path"] = "none"
    """min_snr and debiased with flow matching: "none": all noise levels have the same weight. "path": the weight
    follows the signal-to-noise ratio of the path from noise to sample, ((1 - t) / t)²."""
    loss: Literal["mse", "huber"] = "mse"
    """Loss function: mean squared error, or pseudo-Huber, which is quadratic for small errors and linear for large
    ones."""
    huber_delta: Annotated[float, Field(gt=0)] = 0.1
    """huber: size of the error at which the loss changes from quadratic to linear."""
    guidance: Annotated[float, Field(ge=0, le=100)] = DEFAULT_GUIDANCE
    """Guidance input of the denoiser during training, for models that have one, such as Flux dev. 1: no guidance;
    diffusers' training scripts for Flux use 3.5."""

    def warnings(self) -> Iterator[SettingsIssue]:
        if self.timesteps == "uniform":
            for name in ("logit_mean", "logit_std"):
                if name in self.model_fields_set:
                    yield SettingsIssue(name, 'has no effect without timesteps: "logit_normal"')
        if "snr_gamma" in self.model_fields_set and self.weighting != "min_snr":
            yield SettingsIssue("snr_gamma", 'has no effect without weighting: "min_snr"')
        if "flow_snr" in self.model_fields_set and self.weighting not in ("min_snr", "debiased"):
            yield SettingsIssue("flow_snr", 'has no effect without weighting: "min_snr" or "debiased"')
        if "huber_delta" in self.model_fields_set and self.loss != "huber":
            yield SettingsIssue("huber_delta", 'has no effect without loss: "huber"')
