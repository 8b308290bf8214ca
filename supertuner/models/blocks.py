"""The blocks of a denoiser: pieces that run one after the other, each recomputed or moved as a whole."""

from __future__ import annotations

from torch import nn


def named_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """Name in the module → block, in the order of the forward pass.

    Transformers keep them in lists; a U-Net has its middle between the list of its way down and that of its way up.
    Modules that no list holds (embeddings, the last norm) are small, and belong to no block.
    """
    blocks: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            blocks |= {f"{name}.{number}": block for number, block in enumerate(child) if isinstance(block, nn.Module)}
        elif name == "mid_block":
            blocks[name] = child
    if "mid_block" not in blocks:
        return blocks
    order = ("down_blocks", "mid_block", "up_blocks")
    return dict(sorted(blocks.items(), key=lambda item: order.index(item[0].partition(".")[0])))
