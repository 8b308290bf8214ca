"""The variables that `accelerate launch` sets: each becomes a setting, matches what we do by default, or is refused.

The launcher exports its whole configuration file, with default values for keys that the file does not have. Default
values set nothing. A value that accelerate would obey and SuperTuner cannot is an error: no variable is ignored
silently. The tables describe accelerate 1.15.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from supertuner.core.errors import ConfigProblem

ACCELERATE_PREFIX, FSDP_PREFIX = "ACCELERATE_", "FSDP_"
USE_FSDP, DYNAMO_BACKEND = "ACCELERATE_USE_FSDP", "ACCELERATE_DYNAMO_BACKEND"
TRUE_WORDS = {"true": "true", "1": "true", "yes": "true", "on": "true", "y": "true", "t": "true"}
FALSE_WORDS = frozenset(("false", "0", "no", "off", "n", "f", "none"))
ANY_VALUE = frozenset(("*",))


@dataclass(frozen=True, slots=True)
class VariableRule:
    """How a variable is treated. Its values are compared in lower case."""

    accepted_values: Collection[str] = ()
    """Values that need no setting: they ask for the default behaviour, or the launcher exports them by default.
    `ANY_VALUE` accepts all."""
    setting: str = ""
    """The setting that other values set."""
    setting_values: Mapping[str, str] = field(default_factory=dict)
    """Value of the variable → value of the setting. The key "*" matches any value; the value "*" copies it."""
    refusal: str = "it must be true or false"
    """Why every other value is refused, and the remedy."""


@dataclass(frozen=True, slots=True)
class LauncherSetting:
    """A value for a setting, from a variable."""

    variable: str
    setting: str
    text: str


def _must_be_off(refusal: str) -> VariableRule:
    """A feature that SuperTuner does not have: only values that turn it off are accepted."""
    return VariableRule(FALSE_WORDS, refusal=refusal)


ACCELERATE_RULES: Mapping[str, VariableRule] = {
    "ACCELERATE_MIXED_PRECISION": VariableRule(ANY_VALUE),  # see `environment.SETTING_BY_VARIABLE`
    USE_FSDP: VariableRule(FALSE_WORDS, "parallel.strategy", dict.fromkeys(TRUE_WORDS, "fsdp")),
    "ACCELERATE_USE_CPU": VariableRule(FALSE_WORDS, "train.device", dict.fromkeys(TRUE_WORDS, "cpu")),
    "ACCELERATE_TORCH_DEVICE": VariableRule((), "train.device", {"*": "*"}),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": VariableRule((), "train.gradient_accumulation_steps", {"*": "*"}),
    "ACCELERATE_GRADIENT_CLIPPING": VariableRule(("none",), "train.max_grad_norm", {"*": "*"}),
    DYNAMO_BACKEND: VariableRule(
        FALSE_WORDS,
        "model.compile",
        {"inductor": "true"},
        "SuperTuner compiles with inductor only; set dynamo_backend: INDUCTOR, or NO",
    ),
    "ACCELERATE_DYNAMO_MODE": VariableRule(("default",), refusal="set dynamo_mode: default"),
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": _must_be_off("blocks may have graph breaks; set dynamo_use_fullgraph: false"),
    "ACCELERATE_DYNAMO_USE_DYNAMIC": _must_be_off("torch chooses dynamic shapes; set dynamo_use_dynamic: false"),
    # model.compile always compiles block by block.
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": VariableRule(ANY_VALUE),
    "ACCELERATE_USE_DEEPSPEED": _must_be_off("SuperTuner does not use DeepSpeed; set distributed_type: FSDP"),
    "ACCELERATE_USE_MEGATRON_LM": _must_be_off("SuperTuner does not use Megatron-LM; set distributed_type: FSDP"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": _must_be_off(
        "SuperTuner has no multi-dimensional device meshes; remove parallelism_config"
    ),
    "ACCELERATE_USE_SAGEMAKER": _must_be_off("SuperTuner does not support SageMaker; start with torchrun on each node"),
    "ACCELERATE_IN_TPU_POD": _must_be_off("SuperTuner does not support TPUs; unset it"),
    "ACCELERATE_DOWNCAST_BF16": _must_be_off("SuperTuner does not support TPUs; set downcast_bf16: no"),
    "ACCELERATE_DEBUG_MODE": _must_be_off("SuperTuner does not use accelerate's collectives; set debug: false"),
    "ACCELERATE_CPU_AFFINITY": _must_be_off(
        "SuperTuner does not bind processes to CPUs; set enable_cpu_affinity: false, and use numactl if you need it"
    ),
    # These are for the accelerate library, which diffusers may use.
    **{f"ACCELERATE_{name}": VariableRule(ANY_VALUE) for name in ("LOG_LEVEL", "ENABLE_RICH", "DISABLE_RICH")},
    **{f"ACCELERATE_{name}": VariableRule(ANY_VALUE) for name in ("BYPASS_DEVICE_MAP", "INIT_INCLUDE_BUFFERS")},
}

DYNAMO_PREFIX = "ACCELERATE_DYNAMO_"
"""Variables with this prefix count only if ACCELERATE_DYNAMO_BACKEND selects a compiler."""

FSDP_RULES: Mapping[str, VariableRule] = {
    "FSDP_VERSION": VariableRule(("2",), refusal="SuperTuner uses FSDP2 only; set fsdp_version: 2"),
    "FSDP_RESHARD_AFTER_FORWARD": VariableRule(
        setting="parallel.reshard_after_forward",
        setting_values={**TRUE_WORDS, **dict.fromkeys(FALSE_WORDS, "false")},
        refusal="with fsdp_version: 2 it must be true or false",
    ),
    "FSDP_OFFLOAD_PARAMS": VariableRule(FALSE_WORDS, "parallel.cpu_offload", TRUE_WORDS),
    "FSDP_ACTIVATION_CHECKPOINTING": VariableRule(FALSE_WORDS, "train.gradient_checkpointing", TRUE_WORDS),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": _must_be_off(
        "plan.activations sends activations to host memory, not the launcher; set it to false"
    ),
    "FSDP_SHARDING_STRATEGY": VariableRule(
        ("full_shard", "1"),
        refusal="it belongs to fsdp_version 1; remove it, and set fsdp_reshard_after_forward: true or false",
    ),
    "FSDP_AUTO_WRAP_POLICY": VariableRule(
        ("transformer_based_wrap",),
        refusal="SuperTuner shards each transformer block; set fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
    ),
    "FSDP_TRANSFORMER_CLS_TO_WRAP": VariableRule(
        refusal="the model family defines its blocks; remove fsdp_transformer_layer_cls_to_wrap"
    ),
    # Only for SIZE_BASED_WRAP, which is refused; always exported.
    "FSDP_MIN_NUM_PARAMS": VariableRule(ANY_VALUE),
    "FSDP_BACKWARD_PREFETCH": VariableRule(
        ("backward_pre",),
        refusal="FSDP2 prefetches the next block before its backward pass; set BACKWARD_PRE, or remove it",
    ),
    "FSDP_FORWARD_PREFETCH": _must_be_off("FSDP2 prefetches by default; set fsdp_forward_prefetch: false"),
    "FSDP_STATE_DICT_TYPE": VariableRule(
        ("sharded_state_dict",),
        refusal="checkpoints are sharded, exports are not; set fsdp_state_dict_type: SHARDED_STATE_DICT",
    ),
    "FSDP_USE_ORIG_PARAMS": VariableRule(TRUE_WORDS, refusal="FSDP2 always keeps the original parameters; remove it"),
    # These two choose how all ranks get equal weights. Here every process of a node maps the same files, and random
    # initial values are drawn from run.seed.
    "FSDP_CPU_RAM_EFFICIENT_LOADING": VariableRule(ANY_VALUE),
    "FSDP_SYNC_MODULE_STATES": VariableRule(ANY_VALUE),
    "FSDP_IGNORED_MODULES": VariableRule(refusal="every module is sharded; remove fsdp_ignored_modules"),
}
"""These variables count only with ACCELERATE_USE_FSDP, as in accelerate."""


def launcher_settings(environ: Mapping[str, str]) -> Iterator[LauncherSetting | ConfigProblem]:
    """The settings from the launcher's variables, and a problem for each variable that is refused."""
    compiles = environ.get(DYNAMO_BACKEND, "").lower() not in ("", *FALSE_WORDS)
    for variable in sorted(environ):
        value = environ[variable]
        if not value or (variable.startswith(DYNAMO_PREFIX) and variable != DYNAMO_BACKEND and not compiles):
            continue
        if variable.startswith(ACCELERATE_PREFIX):
            yield from _apply_rule(variable, value, ACCELERATE_RULES.get(variable))
        elif variable.startswith(FSDP_PREFIX) and uses_fsdp(environ):
            yield from _apply_rule(variable, value, FSDP_RULES.get(variable))


def uses_fsdp(environ: Mapping[str, str]) -> bool:
    """Whether accelerate's launcher selects FSDP."""
    return environ.get(USE_FSDP, "").lower() in TRUE_WORDS


def _apply_rule(variable: str, value: str, rule: VariableRule | None) -> Iterator[LauncherSetting | ConfigProblem]:
    source_name = f"environment: {variable}"
    if rule is None:
        remedy = "remove it from accelerate's configuration, or unset it"
        yield ConfigProblem(source_name, f"SuperTuner cannot obey {value!r}; {remedy}")
        return
    word = value.strip().lower()
    if rule.accepted_values is ANY_VALUE or word in rule.accepted_values:
        return
    setting_value = rule.setting_values.get(word) or rule.setting_values.get("*")
    if setting_value is None:
        yield ConfigProblem(source_name, f"SuperTuner cannot obey {value!r}: {rule.refusal}")
    else:
        yield LauncherSetting(variable, rule.setting, value.strip() if setting_value == "*" else setting_value)
