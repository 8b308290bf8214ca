"""Which block is used next, and after that: a step repeats, so what is fetched ahead is known and never guessed. Pure.

training    0 1 2 … n-1 | n-1 … 2 1 0 | 0 1 2 …      a forward pass, its backward pass, the next forward pass
sampling    0 1 2 … n-1 | 0 1 2 … n-1 | …            forward passes alone
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from enum import Enum
from itertools import islice
from typing import NamedTuple


class BlockPass(Enum):
    FORWARD = "forward"
    """A backward pass follows."""
    BACKWARD = "backward"
    SAMPLING = "sampling"
    """Another forward pass follows."""


class BlockUse(NamedTuple):
    block: int
    backward: bool


def upcoming_uses(block: int, blocks: int, current_pass: BlockPass) -> Iterator[BlockUse]:
    """The uses after that of `block` in this pass, to the end of the pass that follows: every block is among them."""
    later_blocks = (BlockUse(one, False) for one in range(block + 1, blocks))
    next_forward = (BlockUse(one, False) for one in range(blocks))
    match current_pass:
        case BlockPass.FORWARD:
            yield from later_blocks
            yield from (BlockUse(one, True) for one in reversed(range(blocks)))
        case BlockPass.BACKWARD:
            yield from (BlockUse(one, True) for one in reversed(range(block)))
            yield from next_forward
        case BlockPass.SAMPLING:
            yield from later_blocks
            yield from next_forward


def next_uses(block: int, blocks: int, current_pass: BlockPass, depth: int) -> list[BlockUse]:
    """The next `ahead` uses: what is fetched while `block` computes."""
    return list(islice(upcoming_uses(block, blocks, current_pass), depth))


def uses_until(block: int, other: int, blocks: int, current_pass: BlockPass) -> int:
    """How many uses lie between that of `block` in this pass and the next one of `other`."""
    match current_pass:
        case BlockPass.FORWARD:
            return other - block - 1 if other > block else 2 * (blocks - 1) - block - other
        case BlockPass.BACKWARD:
            return block - other - 1 if other < block else block + other
        case BlockPass.SAMPLING:
            return other - block - 1 if other > block else blocks - 1 - block + other


def block_to_evict(
    loaded: Collection[int], block: int, blocks: int, current_pass: BlockPass, *, is_protected: Callable[[int], bool]
) -> int | None:
    """Of the blocks that are held, the one to give up: the last to be used again; None: all are spared."""
    candidates = [one for one in loaded if one != block and not is_protected(one)]
    return max(candidates, key=lambda one: (uses_until(block, one, blocks, current_pass), one), default=None)
