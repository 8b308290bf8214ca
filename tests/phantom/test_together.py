"""Upstream's features beside ours (S16): the ramp, hints on, off and refused, attention backends, a validation that is
asked for while the job runs, and sound in memory. On the phantom: what is computed means nothing, what happens does."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from supertuner.api.training import train, training_summary
from supertuner.arena.run_context import RunContext
from supertuner.config.sources.load import load_config
from supertuner.core.types import MIB
from tests.fakes.fake_libraries import FakeCuda
from tests.train.runs import config

REFUSED_CALLS = ("cuMemPrefetchAsync", "cuMemPrefetchBatchAsync", "cuMemAdvise")
SHORT = {"device": "cuda", "max_steps": 4}
INVALID_VALUE, FOR_GOOD = 1, 0


@pytest.fixture(params=["on", "off", "refused"])
def hints(request: pytest.FixtureRequest) -> Iterator[str]:
    """Whether hints are asked for; the driver takes them, or refuses each of them."""
    driver = FakeCuda(ctypes.CDLL("libcuda.so.1"))
    for call in REFUSED_CALLS if request.param == "refused" else ():
        driver.fault(call, INVALID_VALUE, times=FOR_GOOD)
    yield request.param
    driver.reset()


@pytest.mark.parametrize("attention", ["native", "_native_math"])
def test_the_ramp_hints_attention_and_an_asked_validation_live_together(
    hints: str, attention: str, tmp_path: Path
) -> None:
    ramp = {
        "enable_uvm_hints": hints != "off",
        "enable_batch_size_rampup": True,
        "initial_effective_batch_size": 1,
        "target_effective_batch_size": 4,
        "batch_rampup_steps": 4,
    }
    file = config(
        tmp_path,
        "together",
        model={"family": "wan2.2", "path": "tiny", "attention": attention, "switch_boundary_every": 2},
        train={"device": "cuda", "max_steps": 8},
        gh200_optimizations=ramp,
        memory={"overflow": {"enabled": True}},
        validation={"at_start": False, "every_steps": None, "at_end": False},
        checkpoints={"every_steps": 0},
    )
    run = tmp_path / "together" / "run"
    asking = threading.Thread(target=ask_for_a_validation, args=(run,), daemon=True)
    asking.start()
    trained = train(load_config(file))
    asking.join()
    losses = [json.loads(line) for line in (run / "losses.jsonl").read_text().splitlines()]
    windows = [row["window"] for row in losses]
    assert windows[0] == 1 and windows[-1] > 1 and windows == sorted(windows), "the ramp went up"
    assert list((run / "samples").glob("asked/*/grid.png")), "asked for while it ran, and made"
    assert len(trained.adapters) == 2
    said = training_summary(trained)
    wanted = {
        "on": "hint applied: read back as requested",
        "off": "residency hints off: gh200_optimizations.enable_uvm_hints is false",
        "refused": "hint refused:",
    }
    assert wanted[hints] in said
    assert ("hint applied" in said) == (hints == "on")
    assert "overflow: not needed" in said


def trained_on_a_small_gpu(file: Path, hbm_bytes: int) -> subprocess.CompletedProcess[str]:
    """`supertuner train` on a GPU of that size."""
    command = [sys.executable, "-W", "ignore", "-c", "from supertuner.cli import main; main()", "train", str(file)]
    environ = {**os.environ, "FAKECUDA_HBM": str(hbm_bytes), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200)


def test_a_run_whose_gpu_memory_overflows_trains_on_and_says_so(tmp_path: Path) -> None:
    overflow = {"enabled": True, "oversubscription_ratio": 20, "class_patterns": {"weights": "cpu_first"}}
    file = config(tmp_path, "spilling", train=SHORT, memory={"overflow": overflow})
    done = trained_on_a_small_gpu(file, 64 * MIB)
    assert done.returncode == 0, done.stderr
    assert "trained 4 steps" in done.stdout
    assert " managed; spilling began " in done.stdout and "refusals" not in done.stdout


def test_a_run_that_reaches_the_ratio_ends_in_words_and_is_told_what_to_do(tmp_path: Path) -> None:
    overflow = {"enabled": True, "oversubscription_ratio": 1.0}
    done = trained_on_a_small_gpu(config(tmp_path, "full", train=SHORT, memory={"overflow": overflow}), 64 * MIB)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "not fit into the device's memory" in done.stderr
    assert "raise memory.overflow.oversubscription_ratio" in done.stderr


def test_a_run_that_does_not_fit_is_told_of_overflow(tmp_path: Path) -> None:
    """By the forecast before it begins; and by the run itself where nobody asked for one."""
    done = trained_on_a_small_gpu(config(tmp_path, "small", train=SHORT), 24 * MIB)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "does not fit" in done.stderr and "forecast.refuse: false" in done.stderr
    unasked = config(tmp_path, "unasked", train=SHORT, forecast={"before_training": "never"})
    done = trained_on_a_small_gpu(unasked, 24 * MIB)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "or memory.overflow.enabled: true" in done.stderr


def ask_for_a_validation(run: Path) -> None:
    """As `supertuner validate` asks: a file that the job finds between two windows."""
    until = time.monotonic() + 60
    while not (run / "requests").is_dir() and time.monotonic() < until:
        time.sleep(0.01)
    (run / "requests" / ".new").write_text('{"kind": "validate"}')
    (run / "requests" / ".new").rename(run / "requests" / "by-hand.json")


def test_sound_that_is_staged_in_memory_is_hinted_like_everything_else(tmp_path: Path) -> None:
    import torch

    from supertuner.data.batching.decoder_pool import DecoderPool
    from supertuner.data.corpus_loader import open_corpus
    from supertuner.data.ordering.micro_batches import micro_batches
    from supertuner.memory.cuda import open_cuda
    from supertuner.memory.driver import NotAvailable
    from supertuner.memory.hints.api import ResidencyHints
    from supertuner.memory.unified.buffers import UnifiedBuffers
    from supertuner.tools.sample_data import make_sample_data

    make_sample_data(tmp_path / "data", images=0, videos=0, sounds=4)
    sound = {
        "id": "sounds",
        "type": "in_memory",
        "dataset_type": "audio",
        "instance_data_dir": str(tmp_path / "data" / "sounds"),
        "in_memory": {"compression": "lz4", "num_workers": 1},
    }
    file = tmp_path / "sound.json"
    file.write_text(json.dumps({"datasets": [sound], "arena": {"home": str(tmp_path / "arenas")}}))
    driver = open_cuda()
    assert not isinstance(driver, NotAvailable)
    buffers = UnifiedBuffers(driver, torch.device("cuda", 0))
    with (
        open_corpus(load_config(file).config, RunContext.silent(file.parent)) as corpus,
        DecoderPool(corpus, 1) as made,
    ):
        batch = made.decode(next(iter(micro_batches(corpus.order, range(2), 2))))
        placed, outcome = buffers.place([batch.media])
        assert placed is not None and outcome.accepted
        assert torch.equal(placed[0].cpu(), batch.media)
        counts = ResidencyHints(driver).place_batch({"waveforms": placed[0]})
        assert all(status.value in ("applied", "no-effect") for status, _ in counts)
