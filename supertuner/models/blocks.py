"""The blocks of a denoiser: submodules that run one after the other, and are checkpointed or moved as a whole."""

from __future__ import annotations

from torch import nn


def named_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """Blocks by their names in the module, in the order of the forward pass.

    Transformers hold their blocks in module lists; a UNet has `mid_block` between `down_blocks` and `up_blocks`.
    Modules outside of the lists (embeddings, the last norm) are small and belong to no block.
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
