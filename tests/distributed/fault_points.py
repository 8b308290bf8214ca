"""Trains under torchrun and lets one rank send itself a signal at a chosen place:

    torchrun … -m tests.distributed.fault_points MARKER PLACE RANK SIGNAL TIMEOUT_S [arguments of supertuner …]

Without arguments of supertuner it trains a model of one number with the real step, gradient sum and watchdog, which
takes a fraction of the imports. The rank writes its process id into the file MARKER before the signal.
"""

from __future__ import annotations

import importlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from supertuner.config.settings.optim import OptimizerSettings
from supertuner.config.settings.parallel import ParallelSettings
from supertuner.config.sources.launcher import LauncherEnvironment, read_launcher_environment
from supertuner.core.errors import SuperTunerError
from supertuner.core.events import NullSink
from supertuner.distributed.torch_process_group import open_process_group
from supertuner.distributed.watchdog.heartbeat import Heartbeat, HeartbeatSink
from supertuner.models.objective.diffusion import TrainingObjective
from supertuner.models.spec import Expert
from supertuner.optim.optimizer_registry import build_optimizer
from supertuner.sinks.training_events import StepRecord, train_step_event
from supertuner.step.batch import StepBatch
from supertuner.step.precision import ComputePrecision
from supertuner.step.train_step import ExpertState, StepOptions, train_window
from supertuner.train.signals import TrainingSignals

CPU = torch.device("cpu")
STEPS = 8
FSDP_FILE = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
IN_BACKWARD, IN_WAIT = "in a backward pass", "in the wait for the sum"


class FaultPlace(NamedTuple):
    function: str
    """The function that is replaced: `module:attribute`."""
    call: int = 3
    """The call at which the fault happens."""


WINDOW_PLACES = {
    "before the process group is joined": FaultPlace("torch.distributed:init_process_group", 1),
    "before a forward pass": FaultPlace("supertuner.step.train_step:sample_losses"),
    IN_BACKWARD: FaultPlace("supertuner.step.train_step:sample_losses"),
    "before a bucket is sent": FaultPlace("supertuner.distributed.gradient_sum:_start_all_reduce"),
    "before the wait for the sum": FaultPlace("supertuner.distributed.gradient_sum:_BucketInFlight.wait_and_unpack"),
    IN_WAIT: FaultPlace("supertuner.distributed.gradient_sum:_start_all_reduce"),
    "before the gradient norm": FaultPlace("supertuner.step.train_step:_unscaled_norm"),
    "before the clipping": FaultPlace("supertuner.step.train_step:_clip"),
    "before the optimizer step": FaultPlace("supertuner.step.train_step:_update_weights"),
    "before control values": FaultPlace("supertuner.distributed.torch_process_group:TorchProcessGroup.all_reduce_max"),
    "before the process group is left": FaultPlace("torch.distributed:destroy_process_group", 1),
    "before the end": FaultPlace("supertuner.distributed.watchdog.watch:RankWatchdog.finish", 1),
}
"""Places that the training of one number passes, too."""
RUN_PLACES = {
    "while data are staged": FaultPlace("supertuner.data.staging.stager:_StagingRun._copy_files", 1),
    "while samples are encoded": FaultPlace("supertuner.train.encoding.encoders:LazyEncoders._run_media_encoder", 1),
    "while the model is loaded": FaultPlace("supertuner.train.setup:_load_trainable_expert", 1),
    "while a batch is read": FaultPlace("supertuner.train.run.dataloader:BatchCollator.collate"),
    "before the loss is logged": FaultPlace("supertuner.train.run.loss_log:LossLog.append"),
    "before a checkpoint is copied": FaultPlace("supertuner.train.checkpoint.async_saver:collect_contents", 2),
    "while a checkpoint is written": FaultPlace("supertuner.train.checkpoint.write_files:write_file"),
    "in the held-out loss": FaultPlace("supertuner.train.validation.held_out_loss:held_out_losses", 1),
    "before samples are made": FaultPlace("supertuner.train.validation.validate:_build_sampler", 1),
    "before the export": FaultPlace("supertuner.train.export.export:_export_expert", 1),
    "before weights are gathered": FaultPlace(f"{FSDP_FILE}:foreach_all_gather"),
    "before gradients are scattered": FaultPlace(f"{FSDP_FILE}:foreach_reduce"),
    "before FSDP's loss": FaultPlace("supertuner.distributed.fsdp:FsdpGradientReduction.reduce_gradients"),
    "before FSDP's norm": FaultPlace("supertuner.distributed.fsdp:FsdpGradientReduction.global_norm"),
}
"""Places of a whole run only."""


def install_fault(place: str, is_victim: bool, act: Callable[[], None]) -> None:
    """Replace the function of a place, so that the victim calls `act` there."""
    function, call = {**WINDOW_PLACES, **RUN_PLACES}[place]
    module_name, _, attributes = function.partition(":")
    owner: Any = importlib.import_module(module_name)
    *owners, name = attributes.split(".")
    for attribute in owners:
        owner = getattr(owner, attribute)
    original, calls = getattr(owner, name), itertools.count(1)

    def replacement(*arguments: Any, **options: Any) -> Any:
        due = next(calls) == call
        if due and place == IN_BACKWARD and is_victim:
            losses = original(*arguments, **options)
            losses.register_hook(lambda _: act())
            return losses
        if due and place == IN_WAIT:
            if is_victim:
                threading.Timer(0.5, act).start()
            else:
                time.sleep(1.5)  # meanwhile the victim waits for this rank
        elif due and is_victim:
            act()
        return original(*arguments, **options)

    setattr(owner, name, replacement)


def train_one_number(env: LauncherEnvironment, timeout_s: float) -> None:
    """Train a number on windows of two micro-batches per rank."""
    heartbeat = Heartbeat()
    sink = HeartbeatSink(NullSink(), heartbeat)
    module = nn.Module()
    module.number = nn.Parameter(torch.ones(()))
    parameters = dict(module.named_parameters())
    state = ExpertState(
        Expert("model", "transformer"), module, parameters, build_optimizer(OptimizerSettings(), parameters, "model")
    )
    with (
        open_process_group(ParallelSettings(timeout_s=timeout_s, strategy="ddp"), env, CPU, heartbeat) as group,
        TrainingSignals() as signals,
    ):
        precision = ComputePrecision("fp32", CPU)
        options = StepOptions(_scale, TrainingObjective(), precision, max_grad_norm=1.0, reduction=group.reduction)
        samples = 2 * group.world_size
        for step in range(1, STEPS + 1):
            result = train_window(
                state, _batches(), samples=samples, learning_rate=0.01, options=options, micro_batches=2
            )
            record = StepRecord(step, step * samples, samples, "model", result.loss, result.grad_norm, 0.01)
            sink.emit(train_step_event(record, seconds=1.0, waited_s=0.0))
            if group.all_reduce_max([signals.stop_number])[0]:
                return


def _scale(module: nn.Module, noisy: torch.Tensor, *_: Any) -> torch.Tensor:
    assert isinstance(module.number, nn.Parameter)
    return noisy * module.number


def _batches() -> Iterator[StepBatch]:
    for position in range(2):
        yield StepBatch(torch.ones(1, 1, 1), torch.ones(1, 1, 1), torch.tensor([0.5]), {}, {}, (position,))


def main(marker: str, place: str, rank: str, number: str, timeout_s: str, *arguments: str) -> None:
    env = read_launcher_environment(os.environ)

    def act() -> None:
        Path(marker).write_text(str(os.getpid()))
        os.kill(os.getpid(), int(number))

    install_fault(place, env.rank == int(rank), act)
    if arguments:
        from supertuner import cli

        cli.main(arguments)
        return
    try:
        train_one_number(env, float(timeout_s))
    except SuperTunerError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main(*sys.argv[1:])
