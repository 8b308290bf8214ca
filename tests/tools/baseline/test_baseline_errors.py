"""What goes wrong with baselines ends in words that name file and remedy, and in exit code 2: 1 is a regression."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from supertuner.cli import main
from supertuner.tools.baseline import peer_ratios as ratios
from supertuner.tools.baseline.confidence_interval import RatioInterval
from supertuner.tools.baseline.store import _canonical, _digest, save_baseline
from tests.tools.baseline.baselining import baseline

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`supertuner baseline …` in a folder with a baseline `one` and ratios `beside`: exit code, and all it said."""
    monkeypatch.chdir(tmp_path)
    save_baseline(tmp_path / "baseline" / "one", baseline(), "", {})
    (tmp_path / "baseline" / "beside").mkdir()
    figures = {name: RatioInterval(0.0, -0.01, 0.01) for name in ratios.COMPARED_FIGURES}
    kept = ratios.PeerRatios("2026-01-31T09:30:00+00:00", 3, figures, (1.0, 0.9, 0.8), {}, 5, "in turns")
    ratios.save_ratios(tmp_path / "baseline" / "beside" / "ratios.json", kept)
    (tmp_path / "peer.py").write_text("")
    (tmp_path / "run.json").write_text("{}")

    def said(*words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(["baseline", *words])
        told = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, told.out + told.err

    return said


def forged(file: Path, **changed: object) -> None:
    """A baseline that says something else, with a checksum that is right."""
    document = json.loads(file.read_text()) | changed
    body = {name: value for name, value in document.items() if name not in ("format", "version", "digest")}
    file.write_text(json.dumps(document | {"digest": _digest(_canonical(body))}))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("check two", "baseline/two is no baseline; there is one"),
        ("compare one two", "baseline/two is no baseline"),
        ("compare two one", "baseline/two is no baseline"),
        ("check beside", "give CONFIG and --peer"),
        ("check beside --peer peer.py", "give CONFIG"),
        ("check nothing run.json --peer peer.py", "baseline/nothing/ratios.json cannot be read"),
        ("check beside run.json --peer no.py", "no.py is no script"),
        ("check one no.json", "no.json"),
        ("check one --steps 5000", "more than the 100"),
        ("check one --repeats 3 --most 2", "--most 2 is below --repeats 3"),
        ("check one --stored --against HEAD", "give one of them"),
        ("check one run.json --against nowhere", "nowhere"),
        ("capture new no.json", "no.json"),
        ("capture one run.json", "--replace"),
        ("capture ../new run.json", "no name of a baseline"),
        ("capture beside run.json --peer peer.py", "--replace"),
        ("capture new run.json --dir run.json", "run.json"),
        ("ls --dir run.json", "run.json"),
    ],
)
def test_what_cannot_be_done_is_no_regression(run: Run, words: str, says: str) -> None:
    code, said = run(*words.split())
    assert code == 2 and says in said, said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("compare one one --steps 5", "--steps says how to run both, and nothing runs without --again"),
        ("compare one one --repeats 3 --most 9", "--repeats and --most says how"),
        ("check beside run.json --peer peer.py --stored", "leave out --stored, or leave out --peer"),
        ("check beside run.json --peer peer.py --against HEAD", "leave out --against, or leave out --peer"),
        ("capture new run.json --peer peer.py --profile", "leave out --profile, or leave out --peer"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(run: Run, words: str, says: str) -> None:
    code, said = run(*words.split())
    assert code == 2 and says in said, said


BROKEN: dict[str, Callable[[Path], object]] = {
    "one/baseline.json cut": lambda at: (at / "one/baseline.json").write_text("{"),
    "one/baseline.json of bytes": lambda at: (at / "one/baseline.json").write_bytes(b"\xff\xfe\x00"),
    "one/baseline.json of another kind": lambda at: (at / "one/baseline.json").write_text("[]"),
    "one/baseline.json a folder": lambda at: ((at / "one/baseline.json").unlink(), (at / "one/baseline.json").mkdir()),
    "one/baseline.json without repeats": lambda at: forged(at / "one/baseline.json", jobs=[]),
    "one/baseline.json with odd repeats": lambda at: forged(at / "one/baseline.json", jobs=[1, 2, 3]),
    "one/baseline.json with odd settings": lambda at: forged(at / "one/baseline.json", resolved={}),
    "one/baseline.json with odd dates": lambda at: forged(at / "one/baseline.json", captured_at=7),
    "one/steps.jsonl gone": lambda at: (at / "one/steps.jsonl").unlink(),
    "one/steps.jsonl cut": lambda at: (at / "one/steps.jsonl").write_text("{}\n"),
    "one/config.json gone": lambda at: (at / "one/config.json").unlink(),
    "one/config.json cut": lambda at: (at / "one/config.json").write_text("{"),
    "one/config.json of another kind": lambda at: (at / "one/config.json").write_text("[]"),
    "one all gone": lambda at: [file.unlink() for file in (at / "one").iterdir()],
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_baseline_is_listed_with_what_is_wrong_and_not_run(run: Run, tmp_path: Path, how: str) -> None:
    BROKEN[how](tmp_path / "baseline")
    file = how.split()[0]
    code, said = run("ls")
    assert code == 2 and f"baseline/{file}" in said and "capture it again" in said, said
    assert "| one " not in said and "| beside " in said, "the other one is listed all the same, and only that"
    code, said = run("check", "one")
    assert code == 2 and f"baseline/{file}" in said, said
    if "config" not in how:
        assert run("compare", "one", "one")[0] == 2


def test_what_was_found_is_told_though_the_report_cannot_be_kept(run: Run, tmp_path: Path) -> None:
    (tmp_path / "baseline/one/against-one.json").mkdir()
    code, said = run("compare", "one", "one")
    assert code == 0 and "no worse." in said and "the report is not kept: baseline/one cannot be written to" in said


def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_is_measured(run: Run, tmp_path: Path) -> None:
    for words in ("capture new run.json", "capture new run.json --peer peer.py"):
        code, said = run(*words.split(), "--dir", "run.json/deep")
        assert code == 2 and "run.json is no folder that can be written to" in said and "preparing" not in said, said


def test_every_baseline_that_can_be_read_is_listed_ratios_too(run: Run) -> None:
    code, said = run("ls")
    assert code == 0 and "| one " in said and "| beside " in said and "1.000" in said, said


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
def test_ratios_that_cannot_be_read_are_listed_so_and_judge_nothing(
    run: Run, tmp_path: Path, old: str, new: str
) -> None:
    file = tmp_path / "baseline/beside/ratios.json"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new, 1))
    for words in ("ls", "check beside run.json --peer peer.py"):
        code, said = run(*words.split())
        assert code == 2 and "baseline/beside/ratios.json" in said and "capture it again" in said, said
