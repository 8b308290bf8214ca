"""The staged samples of a configuration in a plain DataLoader with two workers, which share one copy of the data.

python examples/python/arena_dataset.py run.yaml        # a configuration of yours
python examples/python/arena_dataset.py                 # a few drawn pictures
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from pathlib import Path

from sample_pictures import tiny_settings
from torch.utils.data import DataLoader

import supertuner as st


def mapped_files(process: int) -> set[str]:
    """Device, inode and path of the arena files that a process maps."""
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    return {" ".join(line.split()[3:]) for line in lines if "arena" in line}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(sys.argv[1]) if len(sys.argv) > 1 else tiny_settings(Path(folder))
        with st.data.open(st.load_config(source)) as dataset:
            first = dataset[0]
            print(f"{len(dataset)} samples; the first: {tuple(first['image'].shape)}, {first['caption']!r}")
            loader = DataLoader(
                dataset,
                batch_sampler=dataset.batches(epoch=0),
                collate_fn=dataset.collate,
                num_workers=2,
                persistent_workers=True,
            )
            for batch in loader:
                print(f"{tuple(batch['image'].shape)} {batch['image'].dtype}: {batch['caption']}")
            mappings = [mapped_files(os.getpid())]
            mappings += [mapped_files(worker.pid) for worker in multiprocessing.active_children() if worker.pid]
            same = all(mapping == mappings[0] for mapping in mappings)
            print(f"{len(mappings)} processes map the same {len(mappings[0])} files: {same}")


if __name__ == "__main__":
    main()
