"""What of a run goes into a checkpoint, and back: everything that cannot be computed from its position."""

from __future__ import annotations

from importlib.metadata import version
from typing import NamedTuple

import torch
import xxhash

from supertuner import __version__
from supertuner.core.errors import CheckpointError
from supertuner.core.events import Warned
from supertuner.core.types import JSON
from supertuner.models.adapters import attach as adapters
from supertuner.models.spec import Tensors
from supertuner.optim import state as optimizer_state
from supertuner.step.window import Trainee
from supertuner.train.checkpoint import save as checkpoint
from supertuner.train.checkpoint.load import Loaded
from supertuner.train.checkpoint.parts import Wanted
from supertuner.train.run import Run


class Contents(NamedTuple):
    """A run as it is now."""

    parts: dict[str, Tensors]
    """Its own tensors: training goes on to change them."""
    state: dict[str, JSON]
    begins: dict[str, dict[str, int]]
    """Of parts whose tensors are shared out over processes: tensor → the row of the whole one that it begins with."""


def contents(run: Run) -> Contents:
    parts: dict[str, Tensors] = {"random": _random_states(run.device)}
    experts: dict[str, JSON] = {}
    begins: dict[str, dict[str, int]] = {}
    for trainee in run.trainees:
        expert, trained = trainee.expert.name, run.trained[trainee.expert.name]
        own: dict[str, Tensors] = {"adapter": dict(trained.parameters)}
        own["optimizer"], optimizer = optimizer_state.pack(trainee.optimizer, copy=torch.Tensor.detach)
        facts: dict[str, JSON] = {"optimizer": optimizer}
        if trainee.ema is not None:
            own["ema"], facts["ema_updates"] = dict(trainee.ema.averages), trainee.ema.updates
        if trainee.scaler is not None:
            facts["scaler"] = trainee.scaler.state()
        parts |= {f"{kind}.{expert}": tensors for kind, tensors in own.items()}
        begins |= {f"{kind}.{expert}": _begins(trained, tensors) for kind, tensors in own.items()}
        experts[expert] = facts
    state: dict[str, JSON] = {
        "step": run.step,
        "samples": run.samples,
        "nonfinite": run.nonfinite,
        "experts": experts,
        "losses": list(run.losses.position()),
        "validations": list(run.validations.position()),
    }
    return Contents(parts, state, {part: found for part, found in begins.items() if found})


def _begins(trained: adapters.Trained, tensors: Tensors) -> dict[str, int]:
    """Of what is shared out: what has a parameter's rows has those that the parameter has here."""
    if trained.parts is None:
        return {}
    places, here = trained.parts.places, trained.parameters
    return {
        name: places[parameter].begin
        for name, tensor in tensors.items()
        if (parameter := _parameter(name)) in places and tensor.shape == here[parameter].shape
    }


def _read(loaded: Loaded, part: str, trained: adapters.Trained) -> Tensors:
    """A part of a checkpoint, or the rows of it that are here."""
    if trained.parts is not None:
        places = trained.parts.places
    elif part in loaded.parts and loaded.parts.is_shared_out(part):
        places = {name: adapters.Place(tuple(one.shape), 0) for name, one in trained.parameters.items()}
    else:
        return loaded.part(part)

    def rows(name: str) -> Wanted | None:
        place = places.get(_parameter(name))
        if place is None:
            return None
        return Wanted(place.shape, range(place.begin, place.begin + len(trained.parameters[_parameter(name)])))

    return loaded.part(part, rows)


def _parameter(name: str) -> str:
    """The parameter that a tensor of a checkpoint belongs to: an optimizer's have names of their own behind it."""
    return name.rpartition("/")[0] or name


def constants(run: Run) -> dict[str, JSON]:
    """The facts that are the same in every checkpoint of a session. To look through the captions takes its time."""
    return {
        "processes": run.begun_by,
        "versions": versions(),
        "data": {**data_of(run)},
        "beside": {**_beside(run)},
        "given": {**run.given},
        "revision": run.model.source.revision,
    }


def restore(run: Run, loaded: Loaded) -> None:
    """Go on from a checkpoint, to the bit."""
    state = loaded.state
    step, nonfinite, experts = state.get("step"), state.get("nonfinite"), state.get("experts")
    if not isinstance(step, int) or not isinstance(nonfinite, int) or not isinstance(experts, dict):
        raise CheckpointError(f"{loaded.path}: state.json lacks step, nonfinite or experts; use another checkpoint")
    if step > run.course.total_steps:
        raise CheckpointError(
            f"{loaded.path}: is of step {step}, and this run has {run.course.total_steps} ({run.course.why}); "
            "raise train.max_steps or train.num_epochs"
        )
    _tell_versions(run, loaded)
    _require_same_files(run, loaded)
    for trainee in run.trainees:
        _restore_expert(run, trainee, loaded, experts)
    run.step, run.nonfinite = step, nonfinite
    _set_random_states(loaded.part("random"), run.device)
    if loaded.path.parent.parent == run.folder.resolve():
        _tell_changed_data(run, loaded)
        logs = ((run.losses, _position(loaded, "losses")), (run.validations, _position(loaded, "validations")))
        for log, position in logs:
            log.require(*position)  # a refusal must leave everything as it was
        # Before the cuts: a kill between them would leave later checkpoints beside logs that are too short for them.
        if run.parallel.rank == 0:
            checkpoint.turn_back(run.folder / checkpoint.FOLDER, step, run.sink)
        for log, position in logs:
            log.cut(*position)
    else:
        run.losses.begin()
        run.validations.begin()


def _tell_versions(run: Run, loaded: Loaded) -> None:
    """Other versions may compute other bits: going on with them is allowed, and said."""
    then, now = loaded.state.get("versions"), versions()
    then = then if isinstance(then, dict) else {}
    changed = [
        f"{name} {then.get(name)} then, {now.get(name)} now" for name in now | then if then.get(name) != now.get(name)
    ]
    if changed:
        run.sink.emit(Warned(str(loaded.path), f"{'; '.join(changed)}: going on works, and bits may differ"))


def versions() -> dict[str, JSON]:
    """Of what decides the bits of a step."""
    libraries: dict[str, JSON] = {name: version(name) for name in ("diffusers", "lycoris-lora", "peft")}
    return {"supertuner": __version__, "torch": torch.__version__, **libraries, "threads": torch.get_num_threads()}


def revision_of(loaded: Loaded) -> str | None:
    """The commit of the model on the hub that a checkpoint was trained on; None: it was a folder."""
    revision = loaded.state.get("revision")
    return revision if isinstance(revision, str) else None


def processes_of(loaded: Loaded) -> int:
    """How many processes the windows of a run were made for when it began."""
    processes = loaded.state.get("processes", 1)
    return processes if isinstance(processes, int) and processes >= 1 else 1


def data_of(run: Run) -> dict[str, str]:
    """Dataset → digest of its samples' bytes. Which sample a position is follows from them and from the settings."""
    parts = [part.samples for part in run.maker.corpus.parts]
    return {samples.id: xxhash.xxh3_128_hexdigest(samples.contents().tobytes()) for samples in parts}


def _tell_changed_data(run: Run, loaded: Loaded) -> None:
    """Settings that changed are refused with the run's folder; files behind the same settings may well change."""
    saved, now = loaded.state.get("data"), data_of(run)
    if isinstance(saved, dict) and saved != now:
        names = ", ".join(sorted(name for name in now if saved.get(name) != now[name]))
        text = f"was saved with other files in {names}: from here on the order of samples is another one"
        run.sink.emit(Warned(str(loaded.path), text))
    saved, now = loaded.state.get("beside"), _beside(run)
    if isinstance(saved, dict) and saved != now:
        names = ", ".join(sorted(name for name in now if saved.get(name) != now[name]))
        run.sink.emit(Warned(str(loaded.path), f"was saved with others in {names}: from here on those of now count"))


def _beside(run: Run) -> dict[str, str]:
    """What lies beside the samples and decides what they teach: setting → what it is known by."""
    parts = run.maker.corpus.parts
    captions = {f"datasets[{part.settings.id}].captions": part.samples.caption_digest() for part in parts}
    return captions if run.maker.counting is None else {**captions, **run.maker.counting.digests()}


def _require_same_files(run: Run, loaded: Loaded) -> None:
    """An adapter that learnt on top of another one means nothing on top of a third."""
    saved = loaded.state.get("given")
    if not isinstance(saved, dict) or saved == run.given:
        return
    own = loaded.path.parent.parent == run.folder.resolve()
    for name in sorted(saved.keys() | run.given.keys()):
        if saved.get(name) == run.given.get(name):
            continue
        expert, _, setting = name.partition(": ")
        decides = setting.endswith(".frozen") or any(dataset.prior for dataset in run.config.datasets)
        if own and decides:
            raise CheckpointError(
                f"{loaded.path}: {expert} was trained with other tensors in the file of {setting}; put it back as it "
                "was, or begin another run.name with --resume and this checkpoint if you mean it"
            )
        what = "what is trained goes on above it" if decides else "the checkpoint's values count, not the file's"
        text = f"{expert} was trained with other tensors (or none) in the file of {setting}: {what}"
        run.sink.emit(Warned(str(loaded.path), text))


def _position(loaded: Loaded, name: str) -> tuple[int, str]:
    match loaded.state.get(name):
        case [int(nbytes), str(digest)]:
            return nbytes, digest
        case other:
            raise CheckpointError(f"{loaded.path}: state.json has {name} {other!r}, not bytes and a checksum")


def _restore_expert(run: Run, trainee: Trainee, loaded: Loaded, experts: dict[str, JSON]) -> None:
    expert = trainee.expert.name
    facts = experts.get(expert)
    if not isinstance(facts, dict) or not isinstance(facts.get("optimizer"), dict):
        has = ", ".join(experts) or "none"
        raise CheckpointError(f"{loaded.path}: has no state of the expert {expert}, it has {has}; see model.experts")
    trained = run.trained[expert]
    adapters.load_state(trained, _read(loaded, f"adapter.{expert}", trained))
    home = None if run.acts is None else run.acts.state_home(expert)
    optimizer_state.unpack(trainee.optimizer, _read(loaded, f"optimizer.{expert}", trained), facts["optimizer"], home)
    if trainee.ema is not None:
        updates = facts.get("ema_updates")
        if not isinstance(updates, int):
            raise CheckpointError(f"{loaded.path}: has no moving average of {expert}; unset train.ema_decay")
        trainee.ema.load(_read(loaded, f"ema.{expert}", trained), updates)
    if trainee.scaler is not None:
        scaler = facts.get("scaler")
        if not isinstance(scaler, dict):
            raise CheckpointError(f"{loaded.path}: was not trained in fp16; see train.mixed_precision")
        trainee.scaler.load(scaler)


def _random_states(device: torch.device) -> Tensors:
    """Nothing of ours draws on these; a library may."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_random_states(states: Tensors, device: torch.device) -> None:
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
