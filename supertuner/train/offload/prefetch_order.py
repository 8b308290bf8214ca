"""Which block is used next, and after that: a step repeats, so what is fetched ahead is known and never guessed. Pure.

training    0 1 2 … n-1 | n-1 … 2 1 0 | 0 1 2 …      a forward pass, its backward pass, the next forward pass
sampling    0 1 2 … n-1 | 0 1 2 … n-1 | …            forward passes alone
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from enum import Enum
from itertools import islice
from typing import NamedTuple


class Pass(Enum):
    FORWARD = "forward"
    """A backward pass follows."""
    BACKWARD = "backward"
    SAMPLING = "sampling"
    """Another forward pass follows."""


class Use(NamedTuple):
    block: int
    backward: bool


def upcoming(block: int, blocks: int, now: Pass) -> Iterator[Use]:
    """The uses after that of `block` in this pass, to the end of the pass that follows: every block is among them."""
    later = (Use(one, False) for one in range(block + 1, blocks))
    again = (Use(one, False) for one in range(blocks))
    match now:
        case Pass.FORWARD:
            yield from later
            yield from (Use(one, True) for one in reversed(range(blocks)))
        case Pass.BACKWARD:
            yield from (Use(one, True) for one in reversed(range(block)))
            yield from again
        case Pass.SAMPLING:
            yield from later
            yield from again


def soon(block: int, blocks: int, now: Pass, ahead: int) -> list[Use]:
    """The next `ahead` uses: what is fetched while `block` computes."""
    return list(islice(upcoming(block, blocks, now), ahead))


def distance(block: int, other: int, blocks: int, now: Pass) -> int:
    """How many uses lie between that of `block` in this pass and the next one of `other`."""
    match now:
        case Pass.FORWARD:
            return other - block - 1 if other > block else 2 * (blocks - 1) - block - other
        case Pass.BACKWARD:
            return block - other - 1 if other < block else block + other
        case Pass.SAMPLING:
            return other - block - 1 if other > block else blocks - 1 - block + other


def farthest(held: Collection[int], block: int, blocks: int, now: Pass, *, spared: Callable[[int], bool]) -> int | None:
    """Of the blocks that are held, the one to give up: the last to be used again; None: all are spared."""
    found = [one for one in held if one != block and not spared(one)]
    return max(found, key=lambda one: (distance(block, one, blocks, now), one), default=None)
