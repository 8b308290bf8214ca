"""SuperTuner fine-tunes diffusion models on machines whose CPU and GPU share memory.

    import supertuner as st

    config = st.load_config("run.yaml", overrides={"train.batch_size": 2})
    forecast = st.estimate(config, machine="gh200-96")
    result = st.train(config)

Importing this package imports nothing else: each name of the API is loaded when it is first used (PEP 562).
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from supertuner import data as data
    from supertuner import memory as memory
    from supertuner.api import adapters as adapters
    from supertuner.api import arenas as arenas
    from supertuner.api import checkpoints as checkpoints
    from supertuner.api import hints as hints
    from supertuner.api.callbacks import SavedCheckpoint as SavedCheckpoint
    from supertuner.api.callbacks import TrainingCallback as TrainingCallback
    from supertuner.api.callbacks import TrainingControl as TrainingControl
    from supertuner.api.callbacks import ValidationReport as ValidationReport
    from supertuner.api.configuration import load_config as load_config
    from supertuner.api.configuration import render_config as render_config
    from supertuner.api.forecasting import RunPlan as RunPlan
    from supertuner.api.forecasting import estimate as estimate
    from supertuner.api.forecasting import plan as plan
    from supertuner.api.sampling import GeneratedSamples as GeneratedSamples
    from supertuner.api.sampling import sample as sample
    from supertuner.api.training import TrainingResult as TrainingResult
    from supertuner.api.training import train as train
    from supertuner.config.sources.load import LoadedConfig as LoadedConfig
    from supertuner.core import errors as errors
    from supertuner.core.errors import SuperTunerError as SuperTunerError
    from supertuner.plan.forecast.results import RunForecast as RunForecast
    from supertuner.runs.request_client import send_request as send_request
    from supertuner.runs.run_reader import open_run as open_run
    from supertuner.sinks.training_events import StepRecord as StepRecord

_MODULES = {
    "adapters": "supertuner.api.adapters",
    "arenas": "supertuner.api.arenas",
    "checkpoints": "supertuner.api.checkpoints",
    "data": "supertuner.data",
    "errors": "supertuner.core.errors",
    "hints": "supertuner.api.hints",
    "memory": "supertuner.memory",
    "plan": "supertuner.plan",
    "train": "supertuner.train",
}
"""Public name → the module that it is."""
_MEMBERS = {
    "GeneratedSamples": "supertuner.api.sampling",
    "LoadedConfig": "supertuner.config.sources.load",
    "RunForecast": "supertuner.plan.forecast.results",
    "RunPlan": "supertuner.api.forecasting",
    "SavedCheckpoint": "supertuner.api.callbacks",
    "StepRecord": "supertuner.sinks.training_events",
    "SuperTunerError": "supertuner.core.errors",
    "TrainingCallback": "supertuner.api.callbacks",
    "TrainingControl": "supertuner.api.callbacks",
    "TrainingResult": "supertuner.api.training",
    "ValidationReport": "supertuner.api.callbacks",
    "estimate": "supertuner.api.forecasting",
    "load_config": "supertuner.api.configuration",
    "open_run": "supertuner.runs.run_reader",
    "render_config": "supertuner.api.configuration",
    "sample": "supertuner.api.sampling",
    "send_request": "supertuner.runs.request_client",
}
"""Public name → the module that defines it."""
_FUNCTIONS_OF_PACKAGES = {"plan": "supertuner.api.forecasting", "train": "supertuner.api.training"}
"""Name of a function that a sub-package has as well → the module that defines the function."""

__all__ = [
    "GeneratedSamples",
    "LoadedConfig",
    "RunForecast",
    "RunPlan",
    "SavedCheckpoint",
    "StepRecord",
    "SuperTunerError",
    "TrainingCallback",
    "TrainingControl",
    "TrainingResult",
    "ValidationReport",
    "__version__",
    "adapters",
    "arenas",
    "checkpoints",
    "data",
    "errors",
    "estimate",
    "hints",
    "load_config",
    "memory",
    "open_run",
    "plan",
    "render_config",
    "sample",
    "send_request",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name in _MEMBERS:
        return getattr(import_module(_MEMBERS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


class _CallablePackage(ModuleType):
    """A sub-package that is also a function of the API: `supertuner.train(config)` beside `supertuner.train.loop`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._api_function(*args, **kwargs)

    @property
    def __wrapped__(self) -> Any:
        """The function, for `inspect.signature` and `help` of interactive shells."""
        return self._api_function

    @property
    def _api_function(self) -> Any:
        name = self.__name__.rpartition(".")[2]
        return getattr(import_module(_FUNCTIONS_OF_PACKAGES[name]), name)


class _ApiPackage(ModuleType):
    """This package: makes a sub-package callable when Python's import system binds it here."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FUNCTIONS_OF_PACKAGES:
            value.__class__ = _CallablePackage
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _ApiPackage
