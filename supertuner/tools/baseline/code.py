"""Which code is measured: this one, another revision of this checkout, another checkout, or another environment's.

Another revision is written out into a folder of its own, never checked out: nothing of the working tree is touched.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import supertuner
from supertuner.core.errors import BaselineError
from supertuner.tools.baseline.turns import Command

MODULE: Final = "supertuner.tools.baseline.job"
PACKAGE: Final = Path(supertuner.__file__).resolve().parent


def here(environ: Mapping[str, str]) -> Command:
    """The code that runs now."""
    return _command("the code here", sys.executable, PACKAGE.parent, environ)


@contextmanager
def other(what: str, environ: Mapping[str, str]) -> Iterator[Command]:
    """Code by a name: a folder that holds the package, an environment's python, or a git revision of this checkout."""
    path = Path(what).expanduser()
    if what and (path / "supertuner").is_dir():
        _require_job(path, what)
        yield _command(f"the code in {path}", sys.executable, path.resolve(), environ)
    elif path.is_file():
        yield _command(f"the code of {path}", str(path.absolute()), None, environ)
    else:
        commit = commit_of(what)
        if commit is None:
            raise BaselineError(
                f"{what!r} is no folder with a supertuner in it, no python, and no git revision of {PACKAGE.parent}"
            )
        with TemporaryDirectory(prefix="supertuner-code-") as folder:
            _export(commit, Path(folder))
            _require_job(Path(folder), what)
            yield _command(f"revision {commit[:10]}", sys.executable, Path(folder), environ)


def commit_of(revision: str) -> str | None:
    """The commit that a revision of this checkout is; None: no such, or no checkout."""
    if not (PACKAGE.parent / ".git").exists() or revision.startswith("-"):
        return None
    found = _git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    return found or None


def commit_here() -> str | None:
    """The commit of the code that runs now, with `+` where files of the package are others; None: no checkout."""
    commit = commit_of("HEAD")
    if commit is None:
        return None
    return commit + ("+" if _git("status", "--porcelain", "--", "supertuner") else "")


def _command(title: str, python: str, path: Path | None, environ: Mapping[str, str]) -> Command:
    given = dict(environ)
    if path is not None:
        given["PYTHONPATH"] = ":".join([str(path), *([environ["PYTHONPATH"]] if environ.get("PYTHONPATH") else [])])
    # -P: the folder that the command is given in must not come before it
    return Command(title, (python, "-P", "-m", MODULE), given, path)


def _export(commit: str, folder: Path) -> None:
    """The package at a commit, with its libraries in C: those here where their sources are the same, else built."""
    archive = folder / "code.tar"
    _git("archive", "--format=tar", f"--output={archive}", commit, "supertuner", "setup.py", "pyproject.toml")
    unpacked = subprocess.run(["tar", "-xf", str(archive), "-C", str(folder)], capture_output=True, check=False)
    if unpacked.returncode != 0:  # git has left a file all the same
        lacks = "it lacks supertuner, setup.py or pyproject.toml"
        raise BaselineError(f"git cannot write out {commit[:10]}: {lacks}; name a later revision")
    archive.unlink()
    sources = [*PACKAGE.rglob("*.c"), *PACKAGE.rglob("*.h"), PACKAGE.parent / "setup.py"]
    root = PACKAGE.parent
    if all(_same(file, folder / file.relative_to(root)) for file in sources):
        for library in PACKAGE.rglob("*.so"):
            target = folder / library.relative_to(root)
            if target.parent.is_dir():
                shutil.copy2(library, target)
        return
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(build, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BaselineError(f"the C parts of {commit[:10]} cannot be built: {done.stderr.strip()[-500:]}")


def _same(one: Path, other: Path) -> bool:
    return other.is_file() and one.read_bytes() == other.read_bytes()


def _require_job(folder: Path, what: str) -> None:
    if not (folder / "supertuner/tools/baseline/job.py").is_file():
        raise BaselineError(f"{what} is older than baselines: it cannot be measured; name a later one")


def _git(*words: str) -> str:
    """What git says; nothing where it fails, or is not here."""
    try:
        done = subprocess.run(["git", "-C", str(PACKAGE.parent), *words], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
