"""Settings of the model that is trained, and of what is trained of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from supertuner.config.settings.block import SettingsBlock, SettingsIssue, name_or_folder

_MODEL = name_or_folder("tiny")
_TARGETS = {"allowed": "the name of a preset in quotes, or a list of endings of module names"}


ModuleNames = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1, max_length=256)]


class ModelSettings(SettingsBlock):
    family: Literal["wan2.2", "flux", "qwen-image", "qwen-image-edit", "sdxl", "sd3.5"] | None = None
    """Which family of models; training needs it."""
    path: Annotated[str | None, Field(min_length=1, json_schema_extra=_MODEL)] = None
    """A folder with a diffusers pipeline, a name on the Hugging Face hub, or "tiny": a random model of a few hundred
    kilobytes, to try a configuration with."""
    revision: Annotated[str | None, Field(min_length=1)] = None
    """Branch, tag or commit of a model on the hub; unset: its main branch."""
    variant: Annotated[str | None, Field(min_length=1)] = None
    """Which of several sets of weight files of a pipeline is read, such as "fp16"."""
    single_file: Path | None = None
    """The denoiser's weights (with two experts: those of the high-noise one) from this .safetensors file instead."""
    single_file_low_noise: Path | None = None
    """The low-noise expert's weights from this .safetensors file instead."""
    offline: bool = False
    """Use what is on this machine, and ask no server."""
    experts: Literal["all", "high_noise", "low_noise"] = "all"
    """Which experts of a model with several are trained."""
    switch_boundary_every: Annotated[int, Field(ge=1)] = 1
    """With several experts: optimizer steps after which training goes on with the next one."""
    attention: str = "native"
    """Attention backend by its name in diffusers, such as "native", "flash", "_flash_3", "flex" or "xformers"; it is
    tried at the start."""
    base_weights: Literal["as_computed", "int8", "fp8"] = "as_computed"
    """Number format of weights that are not trained: that of the computation, or 8 bits by torchao."""
    compile: bool = False
    """Compile the blocks of the model with torch.compile: slow to start, faster afterwards."""

    def contradictions(self) -> Iterator[SettingsIssue]:
        if self.path is not None and self.family is None:
            yield SettingsIssue(
                "family", "is missing: path names a model, and its family says how it is trained", ("path",)
            )
        message = f'is not there: a model of family "{self.family}" has one denoiser'
        if self._has_one_denoiser and self.experts != "all":
            yield SettingsIssue("experts", f'"{self.experts}" {message}', ("family",))
        if self._has_one_denoiser and self.single_file_low_noise is not None:
            yield SettingsIssue("single_file_low_noise", f"{message}; its weights come from single_file", ("family",))

    @property
    def _has_one_denoiser(self) -> bool:
        return self.family not in (None, "wan2.2")

    def warnings(self) -> Iterator[SettingsIssue]:
        if "switch_boundary_every" in self.model_fields_set and (self._has_one_denoiser or self.experts != "all"):
            yield SettingsIssue(
                "switch_boundary_every", "has no effect: one expert is trained, so there is nothing to switch to"
            )
        if self.revision is not None and self.path is not None and (self.path == "tiny" or self.path.startswith("/")):
            yield SettingsIssue(
                "revision", "has an effect only for a model on the hub; path names a model on this machine"
            )
        if self.attention.lower().lstrip("_").startswith("sage"):
            yield SettingsIssue(
                "attention", f'"{self.attention}" computes no gradient, and training refuses it; use "native"'
            )


AdapterRank = Annotated[int, Field(ge=1, le=4096)]
AdapterAlpha = Annotated[float, Field(gt=0)]
AdapterTargets = Annotated[str | ModuleNames, Field(json_schema_extra=_TARGETS)]


class ModuleAdapterSettings(SettingsBlock):
    """Another rank or alpha for some of the layers that an adapter is put on."""

    match: Annotated[str, Field(min_length=1)] = "*"
    """Which layers: a module's name or the end of it, `*` for any letters, such as "ffn.net.2" or "blocks.1*.attn1.*".
    The first entry that fits a layer counts."""
    rank: AdapterRank | None = None
    """Their rank; unset: the adapter's."""
    alpha: AdapterAlpha | None = None
    """Their alpha; unset: the adapter's, and where that is unset too, their rank."""


class ExpertAdapterSettings(SettingsBlock):
    """What is different on one of two experts."""

    rank: AdapterRank | None = None
    """Rank on this expert; unset: `adapter.rank`."""
    alpha: AdapterAlpha | None = None
    """Alpha on this expert; unset: `adapter.alpha`, and where that is unset too, the rank."""
    targets: AdapterTargets | None = None
    """What the adapter is put on in this expert; unset: `adapter.targets`."""
    start_from: Path | None = None
    """The file that this expert's adapter begins with; unset: `adapter.start_from`."""
    frozen: Path | None = None
    """The file of the adapter that is frozen below this expert's; unset: `adapter.frozen`."""


class AdapterSettings(SettingsBlock):
    type: Literal["lora", "locon", "loha", "lokr", "diff", "full"] = "lora"
    """What is trained: a low-rank adapter (by peft); one of LyCORIS, low-rank (locon), of Hadamard products (loha), of
    Kronecker products (lokr) or the targets' whole weights, kept as a difference (diff); or all weights of the
    expert (full)."""
    rank: AdapterRank = 16
    """Rank of the adapter."""
    alpha: AdapterAlpha | None = None
    """The adapter's output is scaled by alpha / rank; unset: equal to the rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the adapter's inputs that is dropped while training (with LyCORIS: of its outputs)."""
    targets: AdapterTargets = "attention"
    """What the adapter is put on: a preset of the family ("attention", "attention_mlp", "all_linear"; with sdxl also
    "all_layers", which has the convolutions too), or endings of module names."""
    dora: bool = False
    """lora: train the length of each row of a weight apart from its direction (DoRA)."""
    rslora: bool = False
    """Scale by alpha / √rank instead of alpha / rank, which keeps high ranks from learning slowly (rsLoRA)."""
    lokr_factor: Annotated[int, Field(ge=-1, le=4096)] = -1
    """lokr: size of the smaller Kronecker factor; -1: the split nearest to square."""
    lokr_full_matrix: bool = False
    """lokr: both factors whole, without a rank."""
    start_from: Path | None = None
    """Begin with the values of this adapter, a .safetensors file in any naming that is known, of the same type and
    ranks."""
    frozen: Path | None = None
    """Train on top of this adapter, a .safetensors file: it is added to the weights, and stays as it is."""
    modules: Annotated[tuple[ModuleAdapterSettings, ...], Field(max_length=256)] = ()
    """Other ranks and alphas for some layers."""
    high_noise: ExpertAdapterSettings = ExpertAdapterSettings()
    """What is different on the high-noise expert."""
    low_noise: ExpertAdapterSettings = ExpertAdapterSettings()
    """What is different on the low-noise expert."""

    def contradictions(self) -> Iterator[SettingsIssue]:
        if self.dora and self.type != "lora":
            yield SettingsIssue("dora", f'is done by peft, with type: "lora" and not "{self.type}"', ("type",))
        if self.lokr_factor == 0:
            yield SettingsIssue("lokr_factor", "is 0; a factor is -1 or at least 1")

    def warnings(self) -> Iterator[SettingsIssue]:
        for name in _UNUSED_FIELDS_BY_TYPE.get(self.type, ()):
            if name in self.model_fields_set:
                yield SettingsIssue(name, f'has no effect with type: "{self.type}"')
        if self.type not in ("lokr", "full", "diff"):
            for name in ("lokr_factor", "lokr_full_matrix"):
                if name in self.model_fields_set:
                    yield SettingsIssue(name, 'has an effect only with type: "lokr"')


_SIZE_FIELDS = ("rank", "alpha", "dropout", "rslora", "lokr_factor", "lokr_full_matrix", "modules")
_UNUSED_FIELDS_BY_TYPE = {"full": (*_SIZE_FIELDS, "targets", "start_from"), "diff": _SIZE_FIELDS}


class ObjectiveSettings(SettingsBlock):
    timesteps: Literal["uniform", "logit_normal"] | None = None
    """How noise levels are drawn; unset: evenly for a model that predicts epsilon or v, as such models were trained,
    and logit_normal for flow matching."""
    logit_mean: float = 0.0
    """logit_normal: mean of the normal distribution whose logistic is the noise level."""
    logit_std: Annotated[float, Field(gt=0)] = 1.0
    """logit_normal: its standard deviation."""
    shift: Annotated[float, Field(gt=0, le=1000)] | Literal["auto"] | None = None
    """Noise levels are moved towards noise, s·t / (1 + (s - 1)·t): by this factor, by one that grows with the number of
    tokens ("auto"), or (unset) as the family's own scheduler says."""
    weighting: Literal["none", "sigma_sqrt", "cosmap", "min_snr", "debiased"] = "none"
    """Weight of a sample's loss by its noise level; "min_snr" and "debiased" by its signal-to-noise ratio."""
    snr_gamma: Annotated[float, Field(gt=0)] = 5.0
    """min_snr: the signal-to-noise ratio above which clean samples count less and less."""
    flow_snr: Literal["none", "path"] = "none"
    """min_snr and debiased with a model of flow matching: all noise levels count the same, or by the signal-to-noise
    ratio of the path from noise to sample, ((1 - l) / l)²."""
    loss: Literal["mse", "huber"] = "mse"
    """What an error costs: its square, or (pseudo-Huber) its square while it is small and its size where it is
    large."""
    huber_delta: Annotated[float, Field(gt=0)] = 0.1
    """huber: the error around which the square ends."""

    def warnings(self) -> Iterator[SettingsIssue]:
        if self.timesteps == "uniform":
            for name in ("logit_mean", "logit_std"):
                if name in self.model_fields_set:
                    yield SettingsIssue(name, 'has an effect only with timesteps: "logit_normal"')
        if "snr_gamma" in self.model_fields_set and self.weighting != "min_snr":
            yield SettingsIssue("snr_gamma", 'has an effect only with weighting: "min_snr"')
        if "flow_snr" in self.model_fields_set and self.weighting not in ("min_snr", "debiased"):
            yield SettingsIssue("flow_snr", 'has an effect only with weighting: "min_snr" or "debiased"')
        if "huber_delta" in self.model_fields_set and self.loss != "huber":
            yield SettingsIssue("huber_delta", 'has an effect only with loss: "huber"')
