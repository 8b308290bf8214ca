"""Where what is trained is stepped: on the device, on the device piece by piece, or on the host.

Weights, gradients, the optimizer's memory and averages each have a home; for a step they come together where it is
made, and go home again. Between windows everything is at home and complete: checkpoints, averages and exports read it
there.

                 gradients                         optimizer's memory, averages        the step
    gpu          with their weights                device                              device
    streamed     with their weights                host                                device, a piece at a time
    host         host, as soon as they are made    host                                host, by all of its cores
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from supertuner.optim.table import Optimizer
from supertuner.plan.placement.plan import Stepping
from supertuner.train.offload.host_buffers import Homes, Key
from supertuner.train.offload.optimizer_state import HOST, TrainedState
from supertuner.train.offload.param_storage import is_plain
from supertuner.train.offload.transfer import Carrier, Mark

PIECEWISE = ("adamw", "adamw8bit", "adafactor")
"""Optimizers that step each parameter for itself. The others count their steps or estimate something for all together:
for them there is one piece."""


@dataclass(eq=False, slots=True)
class _Piece:
    """What of some parameters is on its way to the device."""

    keys: list[Key] = field(default_factory=list)
    homes: list[torch.Tensor] = field(default_factory=list)
    there: list[torch.Tensor] = field(default_factory=list)
    mark: Mark = None


@dataclass(eq=False, slots=True, weakref_slot=True)
class TrainedKeeper:
    """Keeps what is trained of one expert; see `step.window.Keeper`."""

    parameters: Mapping[str, nn.Parameter]
    optimizer: Optimizer
    state: TrainedState
    stepping: Stepping
    blocks: Sequence[Collection[str]]
    """Names of parameters, block by block: what is a piece."""
    away: Collection[str]
    """Parameters whose weights are at home in host memory."""
    carrier: Carrier
    homes: Homes
    forget: Callable[[], None]
    """Weights at home have changed: copies of them elsewhere are worthless."""
    rest: Callable[[], None]
    """The last block is done: its weights go home."""
    _gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of this window, at home."""
    _stepped_at_home: dict[str, torch.Tensor] = field(default_factory=dict)
    """Weights on the device while the host steps their copies."""
    _same: dict[str, int] = field(default_factory=dict)
    """The version of a parameter when its copy at home was last the same."""
    _hooks: list[RemovableHandle] = field(default_factory=list)

    def install(self) -> None:
        """Gradients of weights that are at home, or stepped there, go there as soon as they are made."""
        for name, parameter in self.parameters.items():
            if name in self.away or self.stepping is Stepping.HOST:
                hook = partial(_gradient_made, weakref.ref(self), name)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # ── the keeper's verbs ───────────────────────────────────────────────────────────────────────────────────────

    def settle(self) -> None:
        self.rest()
        changed = []
        at_home = self.parameters if self.stepping is Stepping.HOST else self._gradients
        for name in at_home:  # on the host also what has no gradient: its average is there
            parameter = self.parameters[name]
            if name not in self.away:
                there = self._stepped_at_home[name] = parameter.data
                home = self.homes.of((name, "weight"), there)
                if self._same.get(name) != parameter._version:
                    changed.append((home, there))
                parameter.data = home
            parameter.grad = self._gradients.get(name)
        self._gradients.clear()
        self.homes.send(changed)
        self.homes.arrived()

    def pieces(self) -> Iterator[Collection[str]]:
        if self.stepping is Stepping.HOST:
            self.state.move(HOST)  # all of it is there already, unless it was made before there was a plan
            yield self.parameters
        elif self.stepping is Stepping.STREAMED or self.away:
            pieces = [names for names in self.blocks if names]
            yield from self._one_by_one(pieces if self.optimizer.name in PIECEWISE else [tuple(self.parameters)])
        else:
            yield self.parameters
        if self.away:
            self.forget()

    def finish(self) -> None:
        pairs = []
        for name, there in self._stepped_at_home.items():
            parameter = self.parameters[name]
            pairs.append((there, parameter.data))
            self._same[name] = parameter._version
            parameter.data = there
        if pairs:
            self.carrier.await_(self.carrier.fetch(pairs))
        self._stepped_at_home.clear()
        self.homes.arrived()  # whoever saves or looks reads what is at home

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    def gradient_made(self, name: str, parameter: torch.Tensor) -> None:
        """Send a micro-batch's gradient home, with those before it added as autograd would have added them."""
        made = parameter.grad
        assert made is not None
        if name in self._gradients:
            (before,), mark = self.homes.fetch([self._gradients[name]])
            self.carrier.await_(mark)
            made = before.add_(made)
        home = self._gradients[name] = self.homes.of((name, "gradient"), made)
        self.homes.send([(home, made)])
        parameter.grad = None

    def _one_by_one(self, pieces: Sequence[Collection[str]]) -> Iterator[Collection[str]]:
        """Each piece comes to the device while the one before is stepped, and goes home while the next is."""
        coming = self._bring(pieces[0])
        for number, names in enumerate(pieces):
            here = coming
            coming = self._bring(pieces[number + 1]) if number + 1 < len(pieces) else _Piece()
            if here.keys:
                self.carrier.await_(here.mark)
            self._put(names, here)
            with self._stepping_only(names):
                yield names
            self._send_home(names, here)

    @contextmanager
    def _stepping_only(self, names: Collection[str]) -> Iterator[None]:
        own = {id(self.parameters[name]) for name in names}
        groups = self.optimizer.inner.param_groups
        whole = [group["params"] for group in groups]
        try:
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = [parameter for parameter in parameters if id(parameter) in own]
            yield
        finally:
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters

    def _bring(self, names: Collection[str]) -> _Piece:
        """Begin to fetch what of these parameters is at home."""
        piece = _Piece()
        for name in names:
            for key, tensor in self._at_home(name):
                piece.keys.append(key)
                piece.homes.append(tensor)
        if piece.keys:
            piece.there, piece.mark = self.homes.fetch(piece.homes)
        return piece

    def _at_home(self, name: str) -> Iterator[tuple[Key, torch.Tensor]]:
        parameter = self.parameters[name]
        if name in self.away:
            yield (name, "weight"), parameter.data
            if parameter.grad is not None:
                yield (name, "gradient"), parameter.grad
        for key, tensor in self.state.entries(name):
            if self.homes.is_home(key, tensor):
                yield key, tensor

    def _put(self, names: Collection[str], piece: _Piece) -> None:
        """Put what has come in the places of what is at home."""
        found = dict(zip(piece.keys, piece.there, strict=True))

        def here(key: Key, tensor: torch.Tensor) -> torch.Tensor:
            return found[key] if key in found else tensor.to(self.carrier.device)

        for name in names:
            if (name, "weight") in found:
                parameter = self.parameters[name]
                parameter.grad = None  # one on another device would not be let beside it
                parameter.data = found[name, "weight"]
                parameter.grad = found.get((name, "gradient"))
            self.state.change(name, here)

    def _send_home(self, names: Collection[str], piece: _Piece) -> None:
        """What changed goes home; gradients are used up."""
        weights = []
        for (name, what), home, there in zip(piece.keys, piece.homes, piece.there, strict=True):
            if what == "weight":
                weights.append((home, there))
                self.parameters[name].grad = None
                self.parameters[name].data = home
        self.homes.send(weights)
        if self.stepping is Stepping.STREAMED:
            self._state_home(names)

    def _state_home(self, names: Collection[str]) -> None:
        """Send home what the optimizer remembers of these parameters, and their averages."""
        pairs = []

        def sent(key: Key, tensor: torch.Tensor) -> torch.Tensor:
            if not is_plain(tensor):
                return tensor.to(HOST)
            if self.homes.is_home(key, tensor):
                return tensor
            home = self.homes.of(key, tensor)
            pairs.append((home, tensor))
            return home

        for name in names:
            self.state.change(name, sent)
        self.homes.send(pairs)


def _gradient_made(keeper: weakref.ref[TrainedKeeper], name: str, parameter: torch.Tensor) -> None:
    """A parameter's hook. Weak: torch keeps such hooks where Python finds no circles, and parameter and keeper would
    hold each other for ever."""
    found = keeper()
    assert found is not None, "the keeper lives as long as its expert is trained"
    found.gradient_made(name, parameter)
