"""The only module that reads or changes environment variables: those of the GH200 forks and of launchers, and
SUPERTUNER_A__B for the setting a.b."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from supertuner.config.settings import key_paths
from supertuner.config.sources import accelerate, alloc_conf
from supertuner.config.sources.parse import ConfigSyntaxError, check_plain_values
from supertuner.config.sources.problems import closest_match
from supertuner.config.sources.provenance import ConfigLayer, ConfigSource
from supertuner.config.sources.translate import SourceTranslator
from supertuner.core.errors import ConfigProblem

VARIABLE_PREFIX = "SUPERTUNER_"
NCCL_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"

SETTING_BY_VARIABLE: Mapping[str, str] = {
    "SIMPLETUNER_GH200_ENABLE_UVM_HINTS": "gh200_optimizations.enable_uvm_hints",
    "GH200_UVM_OVERSUBSCRIPTION_RATIO": "memory.overflow.oversubscription_ratio",
    "GH200_UVM_ACCESS_PATTERN": "memory.overflow.access_pattern",
    "ACCELERATE_MIXED_PRECISION": "train.mixed_precision",
}
"""Variables that do not follow SUPERTUNER_A__B, and their settings."""


def current_environment() -> Mapping[str, str]:
    """A copy of the environment of this process."""
    return dict(os.environ)


def variable_name(setting: str) -> str:
    """`train.batch_size` → `SUPERTUNER_TRAIN__BATCH_SIZE`."""
    return VARIABLE_PREFIX + setting.replace(".", "__").upper()


def settings_with_variables() -> tuple[str, ...]:
    """The settings that a SUPERTUNER_ variable can set: all except those inside lists."""
    return tuple(name for name in key_paths.settings() if "[]" not in name)


def environment_layers(environ: Mapping[str, str], folder: Path) -> Iterator[ConfigLayer]:
    """One layer per variable that is set and not empty, in rising precedence: torch's allocator variables, those of
    launchers, those of the GH200 forks, SUPERTUNER_ variables."""
    by_variable = {variable_name(name): name for name in settings_with_variables()}
    for variable in alloc_conf.ALLOC_CONF_VARIABLES:
        yield from _alloc_conf_layers(variable, environ.get(variable, ""), folder)
    for item in accelerate.launcher_settings(environ):
        if isinstance(item, ConfigProblem):
            yield ConfigLayer(problems=[item])
        else:
            yield _variable_layer(item.variable, item.setting, item.text, folder)
    for variable, setting in SETTING_BY_VARIABLE.items():
        if environ.get(variable, ""):
            yield _variable_layer(variable, setting, environ[variable], folder)
    for variable in sorted(environ):
        if not variable.startswith(VARIABLE_PREFIX) or not environ[variable]:
            continue
        if variable in by_variable:
            yield _variable_layer(variable, by_variable[variable], environ[variable], folder)
        else:
            message = _unknown_variable_message(variable, tuple(by_variable))
            yield ConfigLayer(problems=[ConfigProblem(f"environment: {variable}", message)])


def leave_nccl_errors_to_watchdog() -> None:
    """Keep torch's NCCL thread from ending this process, unless the variable is set. Call it before torch creates the
    process group, which reads the variable; it has no parameter for it.

    If another rank is gone, that thread would abort this process with a trace of C++ (3, torch's default), possibly
    before the watchdog has reported which rank it was. With 0 the watchdog ends the process.
    """
    os.environ.setdefault(NCCL_ERROR_HANDLING, "0")


def strip_uvm_keys_for_torch() -> tuple[str, ...]:
    """Remove the GH200 forks' keys from torch's allocator variables and return the names of the changed variables.

    Call it before torch initializes CUDA, which refuses these keys. Their values move to SUPERTUNER_ variables, unless
    those are set, so that a configuration loaded later, or by a child process, gets the same settings.
    """
    changed = []
    for variable in reversed(alloc_conf.ALLOC_CONF_VARIABLES):  # the newer variable wins
        text = os.environ.get(variable, "")
        rest = alloc_conf.strip_uvm_keys(text)
        if rest == text:
            continue
        for entry in reversed(alloc_conf.parse_entries(text)):
            setting = alloc_conf.SETTING_BY_KEY.get(entry.key)
            if setting and entry.value and not any(map(os.environ.get, _variables_giving(setting))):
                os.environ[variable_name(setting)] = entry.value
        if rest:
            os.environ[variable] = rest
        else:
            del os.environ[variable]
        changed.append(variable)
    return tuple(changed)


def _variables_giving(setting: str) -> tuple[str, ...]:
    """The variables that set `setting` and take precedence over torch's."""
    return (variable_name(setting), *(name for name, other in SETTING_BY_VARIABLE.items() if other == setting))


def _alloc_conf_layers(variable: str, text: str, folder: Path) -> Iterator[ConfigLayer]:
    for message in alloc_conf.alloc_conf_problems(text):
        yield ConfigLayer(problems=[ConfigProblem(f"environment: {variable}", message)])
    for entry in alloc_conf.parse_entries(text):
        if entry.key in alloc_conf.SETTING_BY_KEY and entry.value:
            yield _variable_layer(f"{variable} {entry.key}", alloc_conf.SETTING_BY_KEY[entry.key], entry.value, folder)


def _variable_layer(variable: str, setting: str, text: str, folder: Path) -> ConfigLayer:
    source = ConfigSource(f"environment: {variable}", folder, is_file=False, is_text=True)
    key_path = key_paths.parse_path(setting)
    assert key_path is not None
    try:
        check_plain_values(text)
    except ConfigSyntaxError as error:
        return ConfigLayer(problems=[ConfigProblem(source.name, str(error))])
    layer = SourceTranslator(source).translate_value(key_path, text)
    # Variables belong to no dialect.
    layer.values = {path: replace(provenance, dialect="") for path, provenance in layer.values.items()}
    return layer


def _unknown_variable_message(variable: str, known_variables: tuple[str, ...]) -> str:
    suggestion = closest_match(variable.lower(), [name.lower() for name in known_variables])
    if suggestion is None:
        return f"not a setting; {VARIABLE_PREFIX}A__B sets a.b, for example {variable_name('train.batch_size')}"
    return f"not a setting; did you mean {suggestion.upper()}?"
