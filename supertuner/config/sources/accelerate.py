"""What `accelerate launch` says in variables: each becomes a setting, is what is done here anyway, or is refused.

The launcher puts its whole file into the environment, with a value for what nobody wrote there. Such a value is no
wish, and gives no setting. A variable that would be obeyed elsewhere and is not here ends the start: nothing is
ignored in silence. (Learnt from accelerate 1.15.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from supertuner.core.errors import ConfigProblem

ACCELERATE_PREFIX, FSDP_PREFIX = "ACCELERATE_", "FSDP_"
USE_FSDP, DYNAMO_BACKEND = "ACCELERATE_USE_FSDP", "ACCELERATE_DYNAMO_BACKEND"
TRUE_WORDS = {"true": "true", "1": "true", "yes": "true", "on": "true", "y": "true", "t": "true"}
FALSE_WORDS = frozenset(("false", "0", "no", "off", "n", "f", "none"))
ANY_VALUE = frozenset(("*",))


@dataclass(frozen=True, slots=True)
class LauncherVariableRule:
    """What becomes of a variable. Its values are compared in small letters."""

    accepted_values: frozenset[str] = frozenset()
    """Values that ask for what is done anyway, or that the launcher writes where nobody said anything; `ANY`: all."""
    setting: str = ""
    setting_values: Mapping[str, str] = field(default_factory=dict)
    """Value → what the setting gets; "*": whatever it is, as it is written."""
    refusal: str = ""
    """For every other value: why it is refused, and what to do."""


@dataclass(frozen=True, slots=True)
class LauncherSetting:
    """A setting that a variable gives."""

    variable: str
    setting: str
    text: str


def _must_be_off(refusal: str) -> LauncherVariableRule:
    """Something that is not here: only "no" is accepted."""
    return LauncherVariableRule(FALSE_WORDS, refusal=refusal)


ACCELERATE_RULES: Mapping[str, LauncherVariableRule] = {
    "ACCELERATE_MIXED_PRECISION": LauncherVariableRule(
        ANY_VALUE
    ),  # a setting, as it always was: see `environment.VARIABLES`
    USE_FSDP: LauncherVariableRule(FALSE_WORDS, "parallel.strategy", dict.fromkeys(TRUE_WORDS, "fsdp")),
    "ACCELERATE_USE_CPU": LauncherVariableRule(FALSE_WORDS, "train.device", dict.fromkeys(TRUE_WORDS, "cpu")),
    "ACCELERATE_TORCH_DEVICE": LauncherVariableRule(setting="train.device", setting_values={"*": "*"}),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": LauncherVariableRule(
        setting="train.gradient_accumulation_steps", setting_values={"*": "*"}
    ),
    "ACCELERATE_GRADIENT_CLIPPING": LauncherVariableRule(frozenset(("none",)), "train.max_grad_norm", {"*": "*"}),
    DYNAMO_BACKEND: LauncherVariableRule(
        FALSE_WORDS,
        "model.compile",
        {"inductor": "true"},
        "the compiler here is inductor; set dynamo_backend: INDUCTOR, or NO",
    ),
    "ACCELERATE_DYNAMO_MODE": LauncherVariableRule(frozenset(("default",)), refusal="set dynamo_mode: default"),
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": _must_be_off(
        "a block may have breaks in its graph; set dynamo_use_fullgraph: false"
    ),
    "ACCELERATE_DYNAMO_USE_DYNAMIC": _must_be_off(
        "torch decides by itself what is dynamic; set dynamo_use_dynamic: false"
    ),
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": LauncherVariableRule(
        ANY_VALUE
    ),  # model.compile compiles block by block, and only so
    "ACCELERATE_USE_DEEPSPEED": _must_be_off("DeepSpeed is not used here; set distributed_type: FSDP"),
    "ACCELERATE_USE_MEGATRON_LM": _must_be_off("Megatron-LM is not used here; set distributed_type: FSDP"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": _must_be_off(
        "meshes of several dimensions are not available; leave out parallelism_config"
    ),
    "ACCELERATE_USE_SAGEMAKER": _must_be_off("SageMaker is not available; start with torchrun on each node"),
    "ACCELERATE_IN_TPU_POD": _must_be_off("TPUs are not available"),
    "ACCELERATE_DOWNCAST_BF16": _must_be_off("it is for TPUs, which are not available; set downcast_bf16: no"),
    "ACCELERATE_DEBUG_MODE": _must_be_off(
        "it checks accelerate's own collectives, which are not used; set debug: false"
    ),
    "ACCELERATE_CPU_AFFINITY": _must_be_off(
        "processes are not bound to CPUs here; set enable_cpu_affinity: false, and start with numactl if they must be"
    ),
    "ACCELERATE_LOG_LEVEL": LauncherVariableRule(ANY_VALUE),
    "ACCELERATE_ENABLE_RICH": LauncherVariableRule(ANY_VALUE),
    "ACCELERATE_DISABLE_RICH": LauncherVariableRule(ANY_VALUE),
    "ACCELERATE_BYPASS_DEVICE_MAP": LauncherVariableRule(ANY_VALUE),
    "ACCELERATE_INIT_INCLUDE_BUFFERS": LauncherVariableRule(ANY_VALUE),
}
"""Those from the log level on are for accelerate's library, which reads them where diffusers uses it."""

DYNAMO_PREFIX = "ACCELERATE_DYNAMO_"
"""Such variables count where there is a compiler at all."""

FSDP_RULES: Mapping[str, LauncherVariableRule] = {
    "FSDP_VERSION": LauncherVariableRule(frozenset(("2",)), refusal="only FSDP2 is used here; set fsdp_version: 2"),
    "FSDP_RESHARD_AFTER_FORWARD": LauncherVariableRule(
        setting="parallel.reshard_after_forward",
        setting_values={**TRUE_WORDS, **dict.fromkeys(FALSE_WORDS, "false")},
        refusal="it is true or false with fsdp_version: 2",
    ),
    "FSDP_OFFLOAD_PARAMS": LauncherVariableRule(FALSE_WORDS, "parallel.cpu_offload", TRUE_WORDS, "it is true or false"),
    "FSDP_ACTIVATION_CHECKPOINTING": LauncherVariableRule(
        FALSE_WORDS, "train.gradient_checkpointing", TRUE_WORDS, "it is true or false"
    ),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": _must_be_off(
        "activations are sent to host memory by a plan, not by the launcher; set it to false, see plan.activations"
    ),
    "FSDP_SHARDING_STRATEGY": LauncherVariableRule(
        frozenset(("full_shard", "1")),
        refusal="it belongs to fsdp_version 1; leave it out, and say fsdp_reshard_after_forward: true or false",
    ),
    "FSDP_AUTO_WRAP_POLICY": LauncherVariableRule(
        frozenset(("transformer_based_wrap",)),
        refusal="blocks of the model are sharded one by one; set fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
    ),
    "FSDP_TRANSFORMER_CLS_TO_WRAP": LauncherVariableRule(
        refusal="the model says what its blocks are; leave out fsdp_transformer_layer_cls_to_wrap"
    ),
    "FSDP_MIN_NUM_PARAMS": LauncherVariableRule(ANY_VALUE),  # for SIZE_BASED_WRAP, which is refused; always there
    "FSDP_BACKWARD_PREFETCH": LauncherVariableRule(
        frozenset(("backward_pre",)),
        refusal="FSDP2 fetches the next block before a backward pass; set BACKWARD_PRE or leave it out",
    ),
    "FSDP_FORWARD_PREFETCH": _must_be_off("FSDP2 fetches ahead by itself; set fsdp_forward_prefetch: false"),
    "FSDP_STATE_DICT_TYPE": LauncherVariableRule(
        frozenset(("sharded_state_dict",)),
        refusal="checkpoints are in parts, and exports are whole; set fsdp_state_dict_type: SHARDED_STATE_DICT",
    ),
    "FSDP_USE_ORIG_PARAMS": LauncherVariableRule(
        frozenset(TRUE_WORDS), refusal="FSDP2 keeps parameters as they are; leave it out"
    ),
    "FSDP_CPU_RAM_EFFICIENT_LOADING": LauncherVariableRule(
        ANY_VALUE
    ),  # how weights come to be equal everywhere, not which: all processes
    "FSDP_SYNC_MODULE_STATES": LauncherVariableRule(
        ANY_VALUE
    ),  # of a node map the same files, and what is drawn is drawn by the seed
    "FSDP_IGNORED_MODULES": LauncherVariableRule(refusal="no module can be left out; leave out fsdp_ignored_modules"),
}
"""They count with `ACCELERATE_USE_FSDP`, as for accelerate itself."""


def launcher_settings(environ: Mapping[str, str]) -> Iterator[LauncherSetting | ConfigProblem]:
    """What the launcher's variables give, and those that are refused."""
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
    """Whether accelerate's launcher says so."""
    return environ.get(USE_FSDP, "").lower() in TRUE_WORDS


def _apply_rule(
    variable: str, value: str, rule: LauncherVariableRule | None
) -> Iterator[LauncherSetting | ConfigProblem]:
    source_name = f"environment: {variable}"
    if rule is None:
        yield ConfigProblem(
            source_name, f"{value!r} is not obeyed here; leave it out of accelerate's configuration, or unset it"
        )
        return
    word = value.strip().lower()
    if rule.accepted_values is ANY_VALUE or word in rule.accepted_values:
        return
    setting_value = rule.setting_values.get(word) or rule.setting_values.get("*")
    if setting_value is None:
        yield ConfigProblem(source_name, f"{value!r} is not obeyed here: {rule.refusal or 'it is true or false'}")
    else:
        yield LauncherSetting(variable, rule.setting, value.strip() if setting_value == "*" else setting_value)
