"""The loss log of a run that was killed and resumed equals, bit for bit, that of an uninterrupted run."""

from __future__ import annotations

import json
import math
import os
import random
import resource
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supertuner.core.errors import CheckpointError, RunFolderError
from supertuner.runs.loss_files import encode_step, read_losses
from supertuner.sinks.training_events import StepRecord
from supertuner.train.run.loss_log import EMPTY_POSITION, LossLog

floats = st.floats(allow_nan=False, allow_infinity=False)


def record(step: int) -> StepRecord:
    drawn = random.Random(step)
    expert = ("high_noise", "low_noise")[step // 5 % 2]
    return StepRecord(step, 4 * step, 4, expert, drawn.random(), drawn.random(), 1e-4 / step)


def run(path: Path, first: int, last: int) -> None:
    with LossLog(path) as log:
        for step in range(first, last + 1):
            log.append(record(step))


def test_logged_records_are_read_back(tmp_path: Path) -> None:
    run(tmp_path / "losses.jsonl", 1, 12)
    assert read_losses(tmp_path / "losses.jsonl") == [record(step) for step in range(1, 13)]
    assert read_losses(tmp_path / "nothing") == []


@given(floats, floats, st.none() | floats)
def test_numbers_are_read_back_to_the_last_bit(loss: float, rate: float, grad_norm: float | None) -> None:
    line = encode_step(StepRecord(1, 4, 4, "model", loss, grad_norm, rate))
    fields = json.loads(line)
    assert (fields["loss"], fields["rate"], fields["grad_norm"]) == (loss, rate, grad_norm)
    assert math.copysign(1, fields["loss"]) == math.copysign(1, loss) and "not_finite" not in fields


def test_a_value_that_is_not_finite_is_null_and_named(tmp_path: Path) -> None:
    path = tmp_path / "losses.jsonl"
    with LossLog(path) as log:
        log.append(StepRecord(1, 4, 4, "model", math.nan, math.inf, 1e-4))
        log.append(StepRecord(2, 8, 4, "model", -math.inf, None, 1e-4))
    first, second = path.read_text().splitlines()
    assert '"loss": null' in first and '"not_finite": {"loss": "nan", "grad_norm": "inf"}' in first
    assert '"not_finite": {"loss": "-inf"}' in second and '"grad_norm": null' in second
    one, two = read_losses(path)
    assert math.isnan(one.loss) and one.grad_norm == math.inf and two.loss == -math.inf and two.grad_norm is None


def test_a_log_truncated_at_any_checkpoint_continues_to_the_same_bytes(tmp_path: Path) -> None:
    whole = tmp_path / "whole.jsonl"
    run(whole, 1, 30)
    for saved in (0, 1, 7, 29, 30):
        path = tmp_path / f"{saved}.jsonl"
        with LossLog(path) as log:
            for step in range(1, saved + 1):
                log.append(record(step))
            position = log.position()
            for step in range(saved + 1, 26):
                log.append(record(step))
        with path.open("ab") as torn:
            torn.write(b'{"step": 26, "sam')
        with LossLog(path) as log:
            log.truncate(*position)
            assert log.position() == position
            for step in range(saved + 1, 31):
                log.append(record(step))
        assert path.read_bytes() == whole.read_bytes()


def test_a_resumed_log_reports_the_same_positions(tmp_path: Path) -> None:
    with LossLog(tmp_path / "a") as log:
        log.append(record(1))
        early = log.position()
        log.append(record(2))
        late = log.position()
    with LossLog(tmp_path / "a") as log:
        log.truncate(*early)
        log.append(record(2))
        assert log.position() == late and late.nbytes == (tmp_path / "a").stat().st_size


def test_a_log_shorter_than_at_the_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "losses.jsonl"
    with LossLog(path) as log:
        log.append(record(1))
        position = log.position()
    os.truncate(path, position.nbytes - 1)
    with (
        LossLog(path) as log,
        pytest.raises(
            CheckpointError, match=r"losses\.jsonl: it has \d+ bytes, and the checkpoint was saved at \d+; put"
        ),
    ):
        log.truncate(*position)
    assert path.stat().st_size == position.nbytes - 1, "and left as it is"


def test_a_log_with_changed_lines_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "losses.jsonl"
    with LossLog(path) as log:
        log.append(record(1))
        position = log.position()
        log.append(record(2))
    content = bytearray(path.read_bytes())
    content[12] ^= 1
    path.write_bytes(content)
    with (
        LossLog(path) as log,
        pytest.raises(CheckpointError, match="have changed since the checkpoint; put the file"),
    ):
        log.truncate(*position)
    assert path.read_bytes() == content


def test_a_log_with_old_lines_must_be_truncated_before_appending(tmp_path: Path) -> None:
    run(tmp_path / "a", 1, 3)
    with LossLog(tmp_path / "a") as log:
        with pytest.raises(AssertionError, match="truncate it"):
            log.append(record(4))
        log.reset()
        assert log.position() == EMPTY_POSITION and (tmp_path / "a").stat().st_size == 0
        log.append(record(1))


def test_a_torn_last_line_is_not_read_and_a_wrong_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "losses.jsonl"
    run(path, 1, 2)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 3')
    assert len(read_losses(path)) == 2
    for wrong in (
        b"nonsense",
        b"[]",
        b'{"step": 3}',
        b'{"not_finite": 3}',
        whole.split(b"\n")[0].replace(b"1", b'"a"', 1),
    ):
        path.write_bytes(whole + wrong + b"\n")
        with pytest.raises(RunFolderError, match=r"losses\.jsonl, line 3 is not a line"):
            read_losses(path)


def test_a_log_that_is_a_link_is_refused(tmp_path: Path) -> None:
    os.symlink(tmp_path / "elsewhere", tmp_path / "losses.jsonl")
    with pytest.raises(CheckpointError, match="plain file"):
        LossLog(tmp_path / "losses.jsonl")
    assert not (tmp_path / "elsewhere").exists()


def test_a_full_disk_is_an_error_and_the_line_is_not_counted(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with LossLog(tmp_path / "a") as log:
        log.append(record(1))
        position = log.position()
        resource.setrlimit(resource.RLIMIT_FSIZE, (position.nbytes + 10, before[1]))
        try:
            with pytest.raises(CheckpointError, match="cannot be written"):
                log.append(record(2))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, ignored)
        assert log.position() == position
        log.append(record(2))
    assert read_losses(tmp_path / "a") == [record(1), record(2)]
