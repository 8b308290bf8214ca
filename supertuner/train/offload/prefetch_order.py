"""In which order blocks are used: a step repeats, so prefetching needs no prediction. Pure.

training    0 1 2 … n-1 | n-1 … 2 1 0 | 0 1 2 …      a forward pass, its backward pass, the next forward pass
sampling    0 1 2 … n-1 | 0 1 2 … n-1 | …            forward passes only

Since the future is known, the best block to evict is the one whose next use is furthest away (Belady, "A study of
replacement algorithms for a virtual-storage computer", IBM Systems Journal 5, 1966).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
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
    """The uses after that of `block` in this pass, up to the end of the next pass: every block is among them."""
    later_blocks = (BlockUse(other, False) for other in range(block + 1, blocks))
    next_forward = (BlockUse(other, False) for other in range(blocks))
    match current_pass:
        case BlockPass.FORWARD:
            yield from later_blocks
            yield from (BlockUse(other, True) for other in reversed(range(blocks)))
        case BlockPass.BACKWARD:
            yield from (BlockUse(other, True) for other in reversed(range(block)))
            yield from next_forward
        case BlockPass.SAMPLING:
            yield from later_blocks
            yield from next_forward


def next_uses(block: int, blocks: int, current_pass: BlockPass, depth: int) -> list[BlockUse]:
    """The next `depth` uses: the blocks to fetch while `block` computes."""
    return list(islice(upcoming_uses(block, blocks, current_pass), depth))


def uses_until(block: int, other: int, blocks: int, current_pass: BlockPass) -> int:
    """The number of uses between that of `block` in this pass and the next one of `other`: its index in
    `upcoming_uses`, in closed form."""
    # FORWARD, other <= block: the rest of this pass (blocks - 1 - block), then the backward pass from the last block
    # down to `other` (blocks - 1 - other). BACKWARD, other >= block: down to block 0, then up again to `other`.
    match current_pass:
        case BlockPass.FORWARD:
            return other - block - 1 if other > block else 2 * (blocks - 1) - block - other
        case BlockPass.BACKWARD:
            return block - other - 1 if other < block else block + other
        case BlockPass.SAMPLING:
            return other - block - 1 if other > block else blocks - 1 - block + other


def block_to_evict(candidates: Collection[int], block: int, blocks: int, current_pass: BlockPass) -> int | None:
    """The candidate whose next use is furthest away; None if there is none.

    `block`, which computes now, is never evicted. Ties go to the higher number, so that the choice is deterministic.
    """
    others = [other for other in candidates if other != block]
    return max(others, key=lambda other: (uses_until(block, other, blocks, current_pass), other), default=None)
