"""What `accelerate launch` says in variables: each becomes a setting, is what is done here anyway, or is refused.

The launcher puts its whole file into the environment, with a value for what nobody wrote there. Such a value is no
wish, and gives no setting. A variable that would be obeyed elsewhere and is not here ends the start: nothing is
ignored in silence. (Learnt from accelerate 1.15.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from supertuner.core.errors import Problem

PREFIX, FSDP_PREFIX = "ACCELERATE_", "FSDP_"
USE_FSDP, COMPILER = "ACCELERATE_USE_FSDP", "ACCELERATE_DYNAMO_BACKEND"
YES = {"true": "true", "1": "true", "yes": "true", "on": "true", "y": "true", "t": "true"}
NO = frozenset(("false", "0", "no", "off", "n", "f", "none"))
ANY = frozenset(("*",))


@dataclass(frozen=True, slots=True)
class Heard:
    """What becomes of a variable. Its values are compared in small letters."""

    as_here: frozenset[str] = frozenset()
    """Values that ask for what is done anyway, or that the launcher writes where nobody said anything; `ANY`: all."""
    setting: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    """Value → what the setting gets; "*": whatever it is, as it is written."""
    otherwise: str = ""
    """For every other value: why it is refused, and what to do."""


@dataclass(frozen=True, slots=True)
class Gives:
    """A setting that a variable gives."""

    variable: str
    setting: str
    text: str


def _switch(otherwise: str) -> Heard:
    """Something that is not here: only "no" is accepted."""
    return Heard(NO, otherwise=otherwise)


VARIABLES: Mapping[str, Heard] = {
    "ACCELERATE_MIXED_PRECISION": Heard(ANY),  # a setting, as it always was: see `environment.VARIABLES`
    USE_FSDP: Heard(NO, "parallel.strategy", dict.fromkeys(YES, "fsdp")),
    "ACCELERATE_USE_CPU": Heard(NO, "train.device", dict.fromkeys(YES, "cpu")),
    "ACCELERATE_TORCH_DEVICE": Heard(setting="train.device", values={"*": "*"}),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": Heard(setting="train.gradient_accumulation_steps", values={"*": "*"}),
    "ACCELERATE_GRADIENT_CLIPPING": Heard(frozenset(("none",)), "train.max_grad_norm", {"*": "*"}),
    COMPILER: Heard(
        NO, "model.compile", {"inductor": "true"}, "the compiler here is inductor; set dynamo_backend: INDUCTOR, or NO"
    ),
    "ACCELERATE_DYNAMO_MODE": Heard(frozenset(("default",)), otherwise="set dynamo_mode: default"),
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": _switch("a block may have breaks in its graph; set dynamo_use_fullgraph: false"),
    "ACCELERATE_DYNAMO_USE_DYNAMIC": _switch("torch decides by itself what is dynamic; set dynamo_use_dynamic: false"),
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": Heard(ANY),  # model.compile compiles block by block, and only so
    "ACCELERATE_USE_DEEPSPEED": _switch("DeepSpeed is not used here; set distributed_type: FSDP"),
    "ACCELERATE_USE_MEGATRON_LM": _switch("Megatron-LM is not used here; set distributed_type: FSDP"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": _switch(
        "meshes of several dimensions are not available; leave out parallelism_config"
    ),
    "ACCELERATE_USE_SAGEMAKER": _switch("SageMaker is not available; start with torchrun on each node"),
    "ACCELERATE_IN_TPU_POD": _switch("TPUs are not available"),
    "ACCELERATE_DOWNCAST_BF16": _switch("it is for TPUs, which are not available; set downcast_bf16: no"),
    "ACCELERATE_DEBUG_MODE": _switch("it checks accelerate's own collectives, which are not used; set debug: false"),
    "ACCELERATE_CPU_AFFINITY": _switch(
        "processes are not bound to CPUs here; set enable_cpu_affinity: false, and start with numactl if they must be"
    ),
    "ACCELERATE_LOG_LEVEL": Heard(ANY),
    "ACCELERATE_ENABLE_RICH": Heard(ANY),
    "ACCELERATE_DISABLE_RICH": Heard(ANY),
    "ACCELERATE_BYPASS_DEVICE_MAP": Heard(ANY),
    "ACCELERATE_INIT_INCLUDE_BUFFERS": Heard(ANY),
}
"""Those from the log level on are for accelerate's library, which reads them where diffusers uses it."""

WITH_COMPILER = "ACCELERATE_DYNAMO_"
"""Such variables count where there is a compiler at all."""

FSDP: Mapping[str, Heard] = {
    "FSDP_VERSION": Heard(frozenset(("2",)), otherwise="only FSDP2 is used here; set fsdp_version: 2"),
    "FSDP_RESHARD_AFTER_FORWARD": Heard(
        setting="parallel.reshard_after_forward",
        values={**YES, **dict.fromkeys(NO, "false")},
        otherwise="it is true or false with fsdp_version: 2",
    ),
    "FSDP_OFFLOAD_PARAMS": Heard(NO, "parallel.cpu_offload", YES, "it is true or false"),
    "FSDP_ACTIVATION_CHECKPOINTING": Heard(NO, "train.gradient_checkpointing", YES, "it is true or false"),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": _switch(
        "activations are sent to host memory by a plan, not by the launcher; set it to false, see plan.activations"
    ),
    "FSDP_SHARDING_STRATEGY": Heard(
        frozenset(("full_shard", "1")),
        otherwise="it belongs to fsdp_version 1; leave it out, and say fsdp_reshard_after_forward: true or false",
    ),
    "FSDP_AUTO_WRAP_POLICY": Heard(
        frozenset(("transformer_based_wrap",)),
        otherwise="blocks of the model are sharded one by one; set fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
    ),
    "FSDP_TRANSFORMER_CLS_TO_WRAP": Heard(
        otherwise="the model says what its blocks are; leave out fsdp_transformer_layer_cls_to_wrap"
    ),
    "FSDP_MIN_NUM_PARAMS": Heard(ANY),  # for SIZE_BASED_WRAP, which is refused; always there
    "FSDP_BACKWARD_PREFETCH": Heard(
        frozenset(("backward_pre",)),
        otherwise="FSDP2 fetches the next block before a backward pass; set BACKWARD_PRE or leave it out",
    ),
    "FSDP_FORWARD_PREFETCH": _switch("FSDP2 fetches ahead by itself; set fsdp_forward_prefetch: false"),
    "FSDP_STATE_DICT_TYPE": Heard(
        frozenset(("sharded_state_dict",)),
        otherwise="checkpoints are in parts, and exports are whole; set fsdp_state_dict_type: SHARDED_STATE_DICT",
    ),
    "FSDP_USE_ORIG_PARAMS": Heard(frozenset(YES), otherwise="FSDP2 keeps parameters as they are; leave it out"),
    "FSDP_CPU_RAM_EFFICIENT_LOADING": Heard(ANY),  # how weights come to be equal everywhere, not which: all processes
    "FSDP_SYNC_MODULE_STATES": Heard(ANY),  # of a node map the same files, and what is drawn is drawn by the seed
    "FSDP_IGNORED_MODULES": Heard(otherwise="no module can be left out; leave out fsdp_ignored_modules"),
}
"""They count with `ACCELERATE_USE_FSDP`, as for accelerate itself."""


def heard(environ: Mapping[str, str]) -> Iterator[Gives | Problem]:
    """What the launcher's variables give, and those that are refused."""
    compiles = environ.get(COMPILER, "").lower() not in ("", *NO)
    for variable in sorted(environ):
        value = environ[variable]
        if not value or (variable.startswith(WITH_COMPILER) and variable != COMPILER and not compiles):
            continue
        if variable.startswith(PREFIX):
            yield from _become(variable, value, VARIABLES.get(variable))
        elif variable.startswith(FSDP_PREFIX) and uses_fsdp(environ):
            yield from _become(variable, value, FSDP.get(variable))


def uses_fsdp(environ: Mapping[str, str]) -> bool:
    """Whether accelerate's launcher says so."""
    return environ.get(USE_FSDP, "").lower() in YES


def _become(variable: str, value: str, what: Heard | None) -> Iterator[Gives | Problem]:
    where = f"environment: {variable}"
    if what is None:
        yield Problem(where, f"{value!r} is not obeyed here; leave it out of accelerate's configuration, or unset it")
        return
    word = value.strip().lower()
    if what.as_here is ANY or word in what.as_here:
        return
    given = what.values.get(word) or what.values.get("*")
    if given is None:
        yield Problem(where, f"{value!r} is not obeyed here: {what.otherwise or 'it is true or false'}")
    else:
        yield Gives(variable, what.setting, value.strip() if given == "*" else given)
