"""Errors of `supertuner baseline` name the file and the remedy and have exit code 2; 1 means a regression."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from supertuner.cli import main
from supertuner.tools.baseline import peer_ratios as ratios
from supertuner.tools.baseline.confidence_interval import RatioInterval
from supertuner.tools.baseline.record import content_digest
from supertuner.tools.baseline.store import _canonical, save_baseline
from tests.tools.baseline.simulated_jobs import baseline

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `supertuner baseline …` in a folder with a baseline `one` and ratios `peer`: (exit code, all output)."""
    monkeypatch.chdir(tmp_path)
    save_baseline(tmp_path / "baseline" / "one", baseline(), "", {})
    (tmp_path / "baseline" / "peer").mkdir()
    figures = {name: RatioInterval(0.0, -0.01, 0.01) for name in ratios.COMPARED_FIGURES}
    stored = ratios.PeerRatios("2026-01-31T09:30:00+00:00", 3, figures, (1.0, 0.9, 0.8), {}, 5, "in turns")
    ratios.save_ratios(tmp_path / "baseline" / "peer" / "ratios.json", stored)
    (tmp_path / "peer.py").write_text("")
    (tmp_path / "run.json").write_text("{}")

    def run_command(*words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(["baseline", *words])
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, captured.out + captured.err

    return run_command


def forged(file: Path, **changed: object) -> None:
    """Change fields of a baseline and correct its checksum."""
    document = json.loads(file.read_text()) | changed
    body = {name: value for name, value in document.items() if name not in ("format", "version", "digest")}
    file.write_text(json.dumps(document | {"digest": content_digest(_canonical(body))}))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("check two", "baseline/two is not a baseline; baseline has one"),
        ("compare one two", "baseline/two is not a baseline"),
        ("compare two one", "baseline/two is not a baseline"),
        ("check peer", "give CONFIG and --peer"),
        ("check peer --peer peer.py", "give CONFIG"),
        ("check nothing run.json --peer peer.py", "baseline/nothing/ratios.json cannot be read"),
        ("check peer run.json --peer no.py", "no.py is not a file"),
        ("check one no.json", "no.json"),
        ("check one --steps 5000", "more than the 100"),
        ("check one --repeats 3 --most 2", "--most 2 is below --repeats 3"),
        ("check one --stored --against HEAD", "give only one of them"),
        ("check one run.json --against nowhere", "nowhere"),
        ("capture new no.json", "no.json"),
        ("capture one run.json", "--replace"),
        ("capture ../new run.json", "is not a valid name"),
        ("capture peer run.json --peer peer.py", "--replace"),
        ("capture new run.json --dir run.json", "run.json"),
        ("ls --dir run.json", "run.json"),
    ],
)
def test_an_error_has_not_the_exit_code_of_a_regression(run: Run, words: str, message: str) -> None:
    code, output = run(*words.split())
    assert code == 2 and message in output, output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("compare one one --steps 5", "--steps has no effect without --again"),
        ("compare one one --repeats 3 --most 9", "--repeats and --most has no effect"),
        ("check peer run.json --peer peer.py --stored", "leave out --stored, or leave out --peer"),
        ("check peer run.json --peer peer.py --against HEAD", "leave out --against, or leave out --peer"),
        ("capture new run.json --peer peer.py --profile", "leave out --profile, or leave out --peer"),
    ],
)
def test_an_option_without_effect_is_refused(run: Run, words: str, message: str) -> None:
    code, output = run(*words.split())
    assert code == 2 and message in output, output


BROKEN: dict[str, Callable[[Path], object]] = {
    "one/baseline.json truncated": lambda at: (at / "one/baseline.json").write_text("{"),
    "one/baseline.json binary": lambda at: (at / "one/baseline.json").write_bytes(b"\xff\xfe\x00"),
    "one/baseline.json not an object": lambda at: (at / "one/baseline.json").write_text("[]"),
    "one/baseline.json a folder": lambda at: ((at / "one/baseline.json").unlink(), (at / "one/baseline.json").mkdir()),
    "one/baseline.json without repeats": lambda at: forged(at / "one/baseline.json", jobs=[]),
    "one/baseline.json with odd repeats": lambda at: forged(at / "one/baseline.json", jobs=[1, 2, 3]),
    "one/baseline.json with odd settings": lambda at: forged(at / "one/baseline.json", resolved={}),
    "one/baseline.json with odd dates": lambda at: forged(at / "one/baseline.json", captured_at=7),
    "one/steps.jsonl gone": lambda at: (at / "one/steps.jsonl").unlink(),
    "one/steps.jsonl truncated": lambda at: (at / "one/steps.jsonl").write_text("{}\n"),
    "one/config.json gone": lambda at: (at / "one/config.json").unlink(),
    "one/config.json truncated": lambda at: (at / "one/config.json").write_text("{"),
    "one/config.json not an object": lambda at: (at / "one/config.json").write_text("[]"),
    "one all gone": lambda at: [file.unlink() for file in (at / "one").iterdir()],
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_baseline_is_listed_with_its_problem_and_not_run(run: Run, tmp_path: Path, how: str) -> None:
    BROKEN[how](tmp_path / "baseline")
    file = how.split()[0]
    code, output = run("ls")
    assert code == 2 and f"baseline/{file}" in output and "capture it again" in output, output
    assert "| one " not in output and "| peer " in output, "the other baseline is still listed"
    code, output = run("check", "one")
    assert code == 2 and f"baseline/{file}" in output, output
    if "config" not in how:
        assert run("compare", "one", "one")[0] == 2


def test_a_result_is_printed_even_if_the_report_cannot_be_written(run: Run, tmp_path: Path) -> None:
    (tmp_path / "baseline/one/against-one.json").mkdir()
    code, output = run("compare", "one", "one")
    assert code == 0 and "no worse." in output and "the report is not stored: baseline/one cannot be written" in output


def test_a_folder_that_is_not_writable_is_refused_before_anything_is_measured(run: Run, tmp_path: Path) -> None:
    for words in ("capture new run.json", "capture new run.json --peer peer.py"):
        code, output = run(*words.split(), "--dir", "run.json/deep")
        assert code == 2 and "run.json is not a writable folder" in output and "preparing" not in output, output


def test_all_readable_baselines_are_listed_including_ratios(run: Run) -> None:
    code, output = run("ls")
    assert code == 0 and "| one " in output and "| peer " in output and "1.000" in output, output


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"ratio": 1.0', '"ratio": NaN'),
        ('"ratio": 1.0', '"ratio": -1'),
        ('"ratio": 1.0', '"ratio": 2.0'),
        ('"ratio": 1.0', '"ratio": "much"'),
        ('"step"', '"stop"'),
        ('"ours_over_peer"', '"theirs"'),
        ('"steps": 3', '"steps": "many"'),
        ('"losses": [', '"losses": ["low",'),
        ('"version": 1', '"version": 99'),
        ("{", "["),
    ],
)
def test_unreadable_ratios_are_listed_as_a_problem_and_not_used(run: Run, tmp_path: Path, old: str, new: str) -> None:
    file = tmp_path / "baseline/peer/ratios.json"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new, 1))
    for words in ("ls", "check peer run.json --peer peer.py"):
        code, output = run(*words.split())
        assert code == 2 and "baseline/peer/ratios.json" in output and "capture it again" in output, output
