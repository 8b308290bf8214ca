"""What an additional rank of a node costs in memory, and how soon ranks end after one of them is killed.

Ranks are real processes on one staged and cached dataset. The memory of a rank for its data is measured with
/proc/self/smaps: private pages of everything except the arenas, before the data are opened and after some hundred
batches.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from benchmarks import large_set, node_faults
from benchmarks.harness import ClaimRow, FigureSpread, at_most, in_memory_folder, noted, report, say
from benchmarks.node_faults import gathered
from supertuner.arena.home import ArenaHome
from supertuner.arena.node_peers import NodePeers, join_node_peers
from supertuner.arena.run_context import RunContext
from supertuner.data.corpus_loader import open_corpus
from supertuner.data.ordering.micro_batches import single_micro_batch
from supertuner.data.staging.follower import announce_staged, follow_staging
from supertuner.train.encoding.corpus_caches import open_encoded_corpus

MILLION = 1_000_000
CACHED = 100_000
RANKS = 3
BATCHES = 300
ATTACHES = 15
ATTACH_LIMIT_MS = 100.0
OWN_LIMIT_MB = 16.0
END_LIMIT_S = 10.0


def own_mb(home: Path) -> float:
    """Private memory of this process without the arenas, in MB."""
    total, counted = 0, True
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            counted = str(home) not in line
        elif counted and name in ("Private_Clean:", "Private_Dirty:"):
            total += int(rest.split()[0])
    return total * 1024 / 1e6


def rank(folder: Path, number: int, count: int) -> dict[str, float]:
    """In each rank: the private memory for opening and using the data, and the seconds for opening them."""
    config = large_set.config_of(folder)
    home, encoding = ArenaHome(folder / "home"), large_set.encoding_of()
    gc.collect()
    before = own_mb(home.path)
    with join_node_peers(home, "bench", number, count, partial(gathered, folder, "met", count)) as peers:
        begin = time.perf_counter()
        context = RunContext.silent(folder / "runs").with_peers(peers)
        with (
            open_corpus(config, context) as corpus,
            open_encoded_corpus(config, corpus, encoding, context) as encoded,
        ):
            opened_s = time.perf_counter() - begin
            for at, draws in enumerate(corpus.order.batches()):
                micro = single_micro_batch(corpus.order, draws)
                encoded.latents(micro)
                encoded.texts(micro)
                if at >= BATCHES:
                    break
            gc.collect()
            own = own_mb(home.path) - before
            gathered(folder, "done", count)
    return {"own_mb": own, "opened_s": opened_s}


def measured(folder: Path, samples: int, ranks: int = RANKS) -> list[dict[str, float]]:
    """The figures of each rank for a dataset of `samples` samples."""
    config = large_set.config_of(folder)
    large_set.stage(ArenaHome(folder / "home"), config.datasets[0], samples)
    large_set.fill_caches(config)
    here = [sys.executable, "-m", "benchmarks.bench_node", "--rank", str(folder)]
    root = Path(__file__).resolve().parents[1]
    started = [
        subprocess.Popen([*here, str(number), str(ranks)], stdout=subprocess.PIPE, text=True, cwd=root)
        for number in range(ranks)
    ]
    try:
        return [json.loads(process.communicate()[0]) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


def attach_rows() -> list[ClaimRow]:
    with in_memory_folder() as folder:
        home, dataset = ArenaHome(folder / "home"), large_set.config_of(folder).datasets[0]
        name = large_set.stage(home, dataset, MILLION)
        folder_of_peers = home.side_folder(".bench")
        announce_staged(NodePeers(0, 2, folder_of_peers), dataset.id, name)
        taken = []
        with home.attach(name):
            for _ in range(ATTACHES):
                gc.collect()
                begin = time.perf_counter()
                context = RunContext.silent(folder).with_peers(NodePeers(1, 2, folder_of_peers))
                staged = follow_staging(home, dataset.id, "on_demand", context)
                taken.append((time.perf_counter() - begin) * 1e3)
                staged.close()
    spread = FigureSpread(sorted(taken)[len(taken) // 2], min(taken), max(taken))
    return [at_most("attaching a rank to a staged dataset of a million samples", spread, ATTACH_LIMIT_MS, unit="ms")]


def memory_rows() -> list[ClaimRow]:
    with in_memory_folder() as folder:
        first, *others = measured(folder, CACHED)
    opened = ", ".join(f"{figures['opened_s']:.2f} s" for figures in (first, *others))
    say(f"data of {CACHED} samples opened in {opened}")
    most = max(figures["own_mb"] for figures in others)
    return [
        at_most(f"private memory of a further rank, {CACHED} samples and their caches", most, OWN_LIMIT_MB, unit="MB"),
        noted("private memory of the first rank", first["own_mb"], unit="MB"),
    ]


def fault_rows() -> list[ClaimRow]:
    found = []
    for kind in node_faults.KINDS:
        with in_memory_folder() as folder:
            taken = node_faults.ended_s(kind, folder)
        found.append(at_most(f"from the kill of the {kind} to the end of the last rank", taken, END_LIMIT_S, unit="s"))
    return found


def rows() -> list[ClaimRow]:
    return attach_rows() + memory_rows() + fault_rows()


def main() -> int:
    if sys.argv[1:2] == ["--rank"]:
        sys.stdout.write(json.dumps(rank(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))))
        return 0
    return report(rows(), title="node")


if __name__ == "__main__":
    sys.exit(main())
