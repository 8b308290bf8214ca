"""Converting the keys of a full-size LoRA file: at most one second, and at most one tensor in memory.

The file is a rank-16 LoRA of one expert of Wan2.2 14B, attention and feed-forward of 40 blocks: 800 tensors and 400
alphas, 160 MB in bf16. The rival loads everything with safetensors, renames the keys and saves it with safetensors. Our
conversion includes an fsync and a rename; the rival's does not.
"""

from __future__ import annotations

import sys
import tempfile
import tracemalloc
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import ClaimRow, at_most, interleave, noted, paired, report
from supertuner.models.adapters.keys import AdapterTensorName, format_key, read_keys
from supertuner.models.adapters.keys_schemes import KEY_SCHEMES, KeyScheme
from supertuner.train.export.adapter_files import convert_adapter, open_adapter

RANK, WIDTH, HIDDEN, BLOCKS = 16, 5120, 13824, 40
LIMIT_S = 1.0
ROUNDS = 7
FAMILY = "wan2.2"


def lora(scheme: KeyScheme, alpha: float) -> dict[str, torch.Tensor]:
    sizes = {f"{attn}.to_{to}": (WIDTH, WIDTH) for attn in ("attn1", "attn2") for to in ("q", "k", "v", "out.0")}
    sizes |= {"ffn.net.0.proj": (WIDTH, HIDDEN), "ffn.net.2": (HIDDEN, WIDTH)}
    tensors_by_key = {}
    for block in range(BLOCKS):
        for layer, (inputs, outputs) in sizes.items():
            tensors = {
                "lora_A": torch.randn(RANK, inputs).bfloat16(),
                "lora_B": torch.randn(outputs, RANK).bfloat16(),
                "alpha": torch.tensor(alpha),
            }
            for tensor, value in tensors.items():
                name = AdapterTensorName(None, f"blocks.{block}.{layer}", tensor)
                tensors_by_key[format_key(name, scheme, FAMILY)] = value
    return tensors_by_key


def plainly(source: Path, target: Path) -> None:
    """Load all tensors, rename the keys, save."""
    loaded = load_file(source)
    names = read_keys(loaded, FAMILY).names
    scheme = KEY_SCHEMES["diffusers"]
    save_file({format_key(names[key], scheme, FAMILY): tensor for key, tensor in loaded.items()}, target)


def rows() -> list[ClaimRow]:
    with tempfile.TemporaryDirectory(prefix="bench-keys-") as folder:
        named, scaled = Path(folder) / "named.safetensors", Path(folder) / "scaled.safetensors"
        save_file(lora(KEY_SCHEMES["kohya"], float(RANK)), named)
        save_file(lora(KEY_SCHEMES["kohya"], 8.0), scaled)
        out = Path(folder) / "out.safetensors"

        def ours(source: Path) -> None:
            convert_adapter(open_adapter(source), KEY_SCHEMES["diffusers"], out, overwrite=True)

        timings = interleave(
            {"names": lambda: ours(named), "scale": lambda: ours(scaled), "plain": lambda: plainly(named, out)},
            rounds=ROUNDS,
        )
        tracemalloc.start()
        ours(named)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return [
        at_most(
            "a full-size LoRA (160 MB) from kohya's keys to diffusers'", timings["names"].median_s, LIMIT_S, unit="s"
        ),
        at_most("… with alpha multiplied into lora_B", timings["scale"].median_s, LIMIT_S, unit="s"),
        noted("times loading and saving everything with safetensors", paired(timings["names"], timings["plain"])),
        at_most("… Python's peak memory", peak / 2**20, 8.0, unit="MiB"),
    ]


def main() -> int:
    return report(rows(), title="adapter keys")


if __name__ == "__main__":
    sys.exit(main())
