"""Each variable of accelerate's launcher becomes a setting, asks for the default, or is refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import accelerate.utils.launch as its_launcher
import pytest

from supertuner.config.sources.accelerate import ACCELERATE_RULES, FSDP_RULES

USES_FSDP = {"ACCELERATE_USE_FSDP": "true"}
DEFAULT_VARIABLES = {
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
    "ACCELERATE_USE_CPU": "False",
}
"""The variables that `accelerate launch` sets without any option."""
SHIPPED = {
    **{name: value for name, value in DEFAULT_VARIABLES.items() if name != "ACCELERATE_USE_CPU"},
    **USES_FSDP,
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_VERSION": "2",
}
"""The variables that it sets with examples/accelerate_config_gh200.yaml."""


def test_a_launcher_without_options_sets_nothing(load_text):
    assert load_text({}, environ=DEFAULT_VARIABLES).origins == {}


def test_the_shipped_configuration_shards_and_computes_in_bf16(load_text):
    loaded = load_text({}, environ=SHIPPED)
    assert loaded.origins == {
        "parallel.strategy": "environment: ACCELERATE_USE_FSDP",
        "parallel.reshard_after_forward": "environment: FSDP_RESHARD_AFTER_FORWARD",
        "train.mixed_precision": "environment: ACCELERATE_MIXED_PRECISION",
    }
    assert loaded.config.parallel.strategy == "fsdp"
    assert loaded.config.train.mixed_precision == "bf16"


@pytest.mark.parametrize(
    ("variable", "value", "setting", "expected"),
    [
        ("FSDP_RESHARD_AFTER_FORWARD", "false", "parallel.reshard_after_forward", False),
        ("FSDP_OFFLOAD_PARAMS", "true", "parallel.cpu_offload", True),
        ("FSDP_ACTIVATION_CHECKPOINTING", "true", "train.gradient_checkpointing", True),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "model.compile", True),
        ("ACCELERATE_USE_CPU", "True", "train.device", "cpu"),
        ("ACCELERATE_TORCH_DEVICE", "cuda:1", "train.device", "cuda:1"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", "train.gradient_accumulation_steps", 4),
        ("ACCELERATE_GRADIENT_CLIPPING", "1.5", "train.max_grad_norm", 1.5),
    ],
)
def test_variables_become_settings(load_text, variable, value, setting, expected):
    loaded = load_text({}, environ={**SHIPPED, variable: value})
    settings = {path: (value, origin) for path, value, origin in loaded.iter_settings()}
    assert settings[setting] == (expected, f"environment: {variable}")


@pytest.mark.parametrize(
    ("variable", "value", "remedy"),
    [
        ("FSDP_VERSION", "1", "fsdp_version: 2"),
        ("FSDP_SHARDING_STRATEGY", "HYBRID_SHARD", "fsdp_reshard_after_forward"),
        ("FSDP_RESHARD_AFTER_FORWARD", "full_shard", "true or false"),
        ("FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP", "TRANSFORMER_BASED_WRAP"),
        ("FSDP_TRANSFORMER_CLS_TO_WRAP", "Block", "remove fsdp_transformer_layer_cls_to_wrap"),
        ("FSDP_BACKWARD_PREFETCH", "BACKWARD_POST", "BACKWARD_PRE"),
        ("FSDP_FORWARD_PREFETCH", "true", "fsdp_forward_prefetch: false"),
        ("FSDP_STATE_DICT_TYPE", "FULL_STATE_DICT", "SHARDED_STATE_DICT"),
        ("FSDP_USE_ORIG_PARAMS", "false", "remove it"),
        ("FSDP_IGNORED_MODULES", "a.b", "remove fsdp_ignored_modules"),
        ("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", "true", "set it to false"),
        ("FSDP_SOMETHING_NEW", "true", "remove it from accelerate's configuration"),
        ("ACCELERATE_SOMETHING_NEW", "true", "remove it from accelerate's configuration"),
        ("ACCELERATE_USE_DEEPSPEED", "true", "distributed_type: FSDP"),
        ("ACCELERATE_USE_MEGATRON_LM", "true", "distributed_type: FSDP"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true", "remove parallelism_config"),
        ("ACCELERATE_DYNAMO_BACKEND", "EAGER", "INDUCTOR"),
        ("ACCELERATE_CPU_AFFINITY", "1", "enable_cpu_affinity: false"),
        ("ACCELERATE_DEBUG_MODE", "true", "debug: false"),
        ("ACCELERATE_FP8_BACKEND", "AO", "remove it from accelerate's configuration"),
        ("ACCELERATE_MIXED_PRECISION", "fp8", "fp8"),
    ],
)
def test_values_that_cannot_be_obeyed_are_refused_by_name_with_a_remedy(refuse, variable, value, remedy):
    (problem,) = refuse({}, environ={**SHIPPED, variable: value})
    assert variable in problem
    assert remedy in problem


def test_options_of_the_compiler_count_only_with_a_compiler(refuse, load_text):
    fullgraph = {**SHIPPED, "ACCELERATE_DYNAMO_USE_FULLGRAPH": "True"}
    assert not load_text({}, environ=fullgraph).config.model.compile
    (problem,) = refuse({}, environ={**fullgraph, "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"})
    assert "ACCELERATE_DYNAMO_USE_FULLGRAPH" in problem


def test_fsdp_variables_count_only_if_the_launcher_uses_fsdp(load_text):
    """Other programs read FSDP_ variables too."""
    assert load_text({}, environ={"FSDP_OFFLOAD_PARAMS": "true", "FSDP_VERSION": "1"}).origins == {}


def test_the_configuration_file_overrides_the_launcher(load_text):
    loaded = load_text({"parallel": {"strategy": "ddp"}, "mixed_precision": "fp16"}, environ=SHIPPED)
    assert (loaded.config.parallel.strategy, loaded.config.train.mixed_precision) == ("ddp", "fp16")


def test_every_variable_that_the_multi_gpu_launcher_sets_has_a_rule():
    """A variable without a rule is refused. Variables of engines that are refused as a whole are not checked."""
    source = Path(its_launcher.__file__).read_text()
    body = source[source.index("def prepare_multi_gpu_env") : source.index("def prepare_extend_env_parallelism")]
    named = set(re.findall(r'current_env\["((?:ACCELERATE|FSDP)_[A-Z_0-9]+)"\]', body))
    assert len(named) > 20, "the source of the launcher was parsed"
    assert named - ACCELERATE_RULES.keys() - FSDP_RULES.keys() == set()
