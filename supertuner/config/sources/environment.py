"""The only place that touches the environment: variables of the seeds and of launchers, and SUPERTUNER_A__B for the
setting a.b."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from supertuner.config.dialects.translate import Translation
from supertuner.config.problems import nearest
from supertuner.config.sources import accelerate, alloc_conf
from supertuner.config.sources import key_path as places
from supertuner.config.sources.parse import Unreadable, check_plain
from supertuner.config.sources.provenance import Layer, Source
from supertuner.core.errors import Problem

PREFIX = "SUPERTUNER_"

VARIABLES: Mapping[str, str] = {
    "SIMPLETUNER_GH200_ENABLE_UVM_HINTS": "gh200_optimizations.enable_uvm_hints",
    "GH200_UVM_OVERSUBSCRIPTION_RATIO": "memory.overflow.oversubscription_ratio",
    "GH200_UVM_ACCESS_PATTERN": "memory.overflow.access_pattern",
    "ACCELERATE_MIXED_PRECISION": "train.mixed_precision",
}
"""Variables with names of their own, and the setting each one gives."""


def current() -> Mapping[str, str]:
    """The environment of this process, as it is now."""
    return dict(os.environ)


def variable_of(setting: str) -> str:
    """`train.batch_size` → `SUPERTUNER_TRAIN__BATCH_SIZE`."""
    return PREFIX + setting.replace(".", "__").upper()


def settable() -> tuple[str, ...]:
    """Settings that a variable can give: all but those inside a list."""
    return tuple(name for name in places.settings() if "[]" not in name)


def layers(environ: Mapping[str, str], folder: Path) -> Iterator[Layer]:
    """One layer per variable that is set and not empty; ours stand above the seeds', those above a launcher's, and
    those above torch's."""
    by_variable = {variable_of(name): name for name in settable()}
    for variable in alloc_conf.VARIABLES:
        yield from _alloc_conf_layers(variable, environ.get(variable, ""), folder)
    for said in accelerate.heard(environ):
        if isinstance(said, Problem):
            yield Layer(problems=[said])
        else:
            yield _layer(said.variable, said.setting, said.text, folder)
    for variable, setting in VARIABLES.items():
        if environ.get(variable, ""):
            yield _layer(variable, setting, environ[variable], folder)
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or not environ[variable]:
            continue
        if variable in by_variable:
            yield _layer(variable, by_variable[variable], environ[variable], folder)
        else:
            yield Layer(problems=[Problem(f"environment: {variable}", _unknown(variable, tuple(by_variable)))])


def keep_from_torch() -> tuple[str, ...]:
    """Take the seeds' keys out of torch's variables, before torch starts CUDA and refuses them; the variables changed.

    What they say goes into variables of ours, unless it is said there already: a configuration that is loaded later, or
    by a child, gets the same settings.
    """
    changed = []
    for variable in reversed(alloc_conf.VARIABLES):  # the newer one's word counts
        text = os.environ.get(variable, "")
        rest = alloc_conf.without_ours(text)
        if rest == text:
            continue
        for one in reversed(alloc_conf.entries(text)):
            setting = alloc_conf.SETTINGS.get(one.key)
            if setting is not None and one.value and not any(os.environ.get(name) for name in _said_by(setting)):
                os.environ[variable_of(setting)] = one.value
        if rest:
            os.environ[variable] = rest
        else:
            del os.environ[variable]
        changed.append(variable)
    return tuple(changed)


def _said_by(setting: str) -> tuple[str, ...]:
    """The variables that give a setting and stand above torch's."""
    return (variable_of(setting), *(name for name, other in VARIABLES.items() if other == setting))


def _alloc_conf_layers(variable: str, text: str, folder: Path) -> Iterator[Layer]:
    yield from (Layer(problems=[Problem(f"environment: {variable}", message)]) for message in alloc_conf.wrong(text))
    for one in alloc_conf.entries(text):
        if one.key in alloc_conf.SETTINGS and one.value:
            yield _layer(f"{variable} {one.key}", alloc_conf.SETTINGS[one.key], one.value, folder)


def _layer(variable: str, setting: str, text: str, folder: Path) -> Layer:
    source = Source(f"environment: {variable}", folder, is_file=False, is_text=True)
    where = places.parse(setting)
    assert where is not None
    try:
        check_plain(text)
    except Unreadable as error:
        return Layer(problems=[Problem(source.name, str(error))])
    layer = Translation(source).at(where, text)
    layer.given = {w: replace(one, dialect="") for w, one in layer.given.items()}  # a variable is nobody's dialect
    return layer


def _unknown(variable: str, known: tuple[str, ...]) -> str:
    guess = nearest(variable.lower(), [name.lower() for name in known])
    if guess is None:
        return f"not a setting; {PREFIX}A__B gives the setting a.b, such as {variable_of('train.batch_size')}"
    return f"not a setting; did you mean {guess.upper()}?"
