"""Releasing what a block has made: cycles are freed at its end, and a collection does not visit older objects."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from supertuner.memory.out_of_memory import FROZEN_BY_PYTHON, releasing_new_objects

CPU = torch.device("cpu")


class Node:
    """An object in a cycle with itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def collects_only_on_demand() -> Iterator[None]:
    """(The suite freezes objects itself; a training program does not.)"""
    gc.disable()
    gc.unfreeze()
    yield
    gc.freeze()
    gc.enable()


def test_a_cycle_that_was_made_in_the_block_is_freed_at_its_end() -> None:
    with releasing_new_objects(CPU):
        reference = weakref.ref(Node())
        assert reference() is not None
    assert reference() is None


def test_a_module_that_an_error_keeps_alive_is_freed_once_the_error_is_handled() -> None:
    def fail() -> None:
        module = torch.nn.Linear(2, 2)
        references.append(weakref.ref(module))
        error = ValueError("in a cycle: error, traceback, this frame, error")
        raise error

    references: list[weakref.ref[torch.nn.Module]] = []
    with releasing_new_objects(CPU):
        with pytest.raises(ValueError):
            fail()
        assert references[0]() is not None
    assert references[0]() is None


def test_older_objects_are_not_visited_and_are_collected_as_before_afterwards() -> None:
    gc.collect()
    before, older = gc.get_freeze_count(), weakref.ref(Node())
    with releasing_new_objects(CPU):
        pass
    assert older() is not None, "the collection visited an object from before the block"
    assert gc.get_freeze_count() <= before
    gc.collect()
    assert older() is None


def test_objects_that_the_program_has_frozen_stay_frozen() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    assert frozen > FROZEN_BY_PYTHON
    with releasing_new_objects(CPU):
        reference = weakref.ref(Node())
    assert reference() is None and gc.get_freeze_count() > frozen * 0.9
