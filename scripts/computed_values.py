"""Record what short training runs compute, and later tell whether it is still the same to the bit.

    python scripts/computed_values.py record values.json       # before a change
    python scripts/computed_values.py compare values.json      # after it: exit code 1 if anything differs

Every case is one or more calls of the `supertuner` command in a folder of its own, on tiny models and drawn pictures.
Kept are exit codes, digests of every tensor file (exports and checkpoints), of logged losses, held-out losses and
samples' pixels, and of what some commands print. Nothing of the program is imported, so the script measures whatever
`supertuner` this Python finds: an installed one, or a checkout in PYTHONPATH. Bits depend on the machine and on the
versions of torch and its friends: compare only with what was recorded on the same ones.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from computed_values_cases import CONFIG, OTHER_FILES, RUN, Call, Case, Tree, cases, configuration, draw
from PIL import Image

LOGGED: Final = ("step", "samples", "window", "expert", "level", "loss", "grad_norm", "rate", "not_finite")
"""What is computed of a line of losses.jsonl and validation.jsonl."""
TIMEOUT_S: Final = 900
MAIN: Final = "from supertuner.cli import main; main()"


def command(processes: int = 1) -> list[str]:
    """How `supertuner` is called by this Python, alone or by several processes."""
    started = ["-m", "supertuner"] if find_spec("supertuner.__main__") else ["-c", MAIN]
    if processes == 1:
        return [sys.executable, *started]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "--no-python"]
    return [sys.executable, *launcher, sys.executable, *started]


def measure(case: Case, folder: Path) -> Tree:
    """Make the calls of a case in its new folder; every value that came of them, by a name that says what it is."""
    (folder / "made").mkdir(parents=True)
    for name, tree in {CONFIG: configuration(case.changes), **OTHER_FILES}.items():
        (folder / name).write_text(json.dumps(tree, indent=1))
    values: Tree = {}
    for number, call in enumerate(case.calls):
        code, out, said = made(call, folder)
        values[f"exit code of call {number}"] = code
        if code != call.exit_code:
            values.setdefault("failed", f"call {number} ended with {code}, not {call.exit_code}: {said[-600:]}")
        if call.printed:
            printed = json.loads(out.replace(str(folder.parent), ""))
            values |= {f"call {number}: {key}": digest(json.dumps(value)) for key, value in printed.items()}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and wanted(path.relative_to(folder).as_posix()):
            values[path.relative_to(folder).as_posix()] = value_of(path)
    return values


def made(call: Call, folder: Path) -> tuple[int, str, str]:
    """Make a call; its exit code and what it wrote to both streams."""
    with (folder / "stdout").open("w+") as out, (folder / "stderr").open("w+") as err:
        process = subprocess.Popen([*command(call.processes), *call.arguments], cwd=folder, stdout=out, stderr=err)
        try:
            log, deadline = folder / RUN / "losses.jsonl", time.monotonic() + TIMEOUT_S
            while call.stop_after and process.poll() is None and time.monotonic() < deadline:
                if log.exists() and len(log.read_bytes().splitlines()) >= call.stop_after:
                    process.terminate()
                    break
                time.sleep(0.02)
            code = process.wait(TIMEOUT_S)
        finally:
            process.kill()
        return code, (folder / "stdout").read_text(), (folder / "stderr").read_text()


def wanted(name: str) -> bool:
    """Whether a file holds what was computed: no caches, no tiny base model, no curve, and no state of torch's own
    random numbers, which begins anywhere and is not drawn from."""
    if name.endswith("/random.safetensors"):
        return False
    if name.endswith(".safetensors"):
        return re.search(r"(^|/)(exports|checkpoints|made)/", name) is not None
    return name.endswith(("losses.jsonl", "validation.jsonl", "made.png", "before_and_after.png")) or (
        "/samples/" in name and name.endswith((".png", ".mp4"))
    )


def value_of(path: Path) -> str:
    """A digest of a file's content; of a log, its last loss too, for people."""
    if path.suffix == ".safetensors":
        return digest(*tensors(path.read_bytes()))
    if path.suffix == ".png":
        with Image.open(path) as image:
            return digest(f"{image.mode} {image.size}", image.tobytes())
    if path.suffix == ".jsonl":
        rows = [
            {key: row[key] for key in LOGGED if key in row} for row in map(json.loads, path.read_text().splitlines())
        ]
        return f"{digest(json.dumps(rows))} {len(rows)} lines, last loss {rows[-1]['loss'] if rows else None}"
    return digest(path.read_bytes())


def tensors(content: bytes) -> Iterator[str | bytes]:
    """Name, dtype, shape and bytes of each tensor of a safetensors file, by name; no metadata, whatever the order."""
    begin = 8 + int.from_bytes(content[:8], "little")
    header: Tree = json.loads(content[8:begin])
    header.pop("__metadata__", None)
    for name, facts in sorted(header.items()):
        first, last = facts["data_offsets"]
        yield f"{name} {facts['dtype']} {facts['shape']}"
        yield content[begin + first : begin + last]


def digest(*parts: str | bytes) -> str:
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little") + data)
    return total.hexdigest()[:24]


def measured(names: Sequence[str], jobs: int) -> Iterator[tuple[str, Tree, float]]:
    """The values of all cases, or of those of these names, as they come, with the seconds that each took."""
    chosen = {name: case for name, case in cases() if not names or any(re.fullmatch(one, name) for one in names)}
    with TemporaryDirectory(prefix="computed-values-") as temporary, ThreadPoolExecutor(jobs) as pool:
        folder = Path(temporary).resolve()
        draw(folder / "data")

        def one(name: str) -> tuple[str, Tree, float]:
            begun = time.monotonic()
            return name, measure(chosen[name], folder / name), time.monotonic() - begun

        yield from pool.map(one, chosen)


def differences(before: Tree, now: Tree) -> list[str]:
    return [
        f"{key}: {before.get(key, 'nothing')} → {now.get(key, 'nothing')}"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("record", "compare", "list"))
    parser.add_argument("file", type=Path, nargs="?", help="the recorded values")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="a case, or a pattern of names")
    parser.add_argument("--jobs", type=int, default=1, help="cases beside each other")
    given = parser.parse_args()
    if given.what == "list":
        print("\n".join(name for name, _ in cases()))
        return 0
    if given.file is None:
        parser.error("name the file of recorded values")
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    recorded: Tree = json.loads(given.file.read_text()) if given.file.exists() else {}
    if given.what == "compare" and not recorded:
        parser.error(f"{given.file} holds no recorded values")
    spec = find_spec("supertuner")
    print(f"computed by {spec.origin if spec else 'nothing: there is no supertuner here'}", flush=True)
    bad = 0
    for name, values, seconds in measured(given.only, given.jobs):
        if given.what == "record":
            recorded[name] = values
            given.file.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
            wrong = [values["failed"]] if "failed" in values else []
        else:
            wrong = differences(recorded[name], values) if name in recorded else ["was not recorded"]
        bad += bool(wrong)
        same = "different" if wrong else "same" if given.what == "compare" else f"{len(values)} values"
        print("\n  ".join([f"{name}: {same} ({seconds:.0f} s)", *wrong]), flush=True)
    print(f"{bad} cases {'differ' if given.what == 'compare' else 'failed'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
