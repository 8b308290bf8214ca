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
from supertuner.tools.baseline.measured_process import JobCommand

JOB_MODULE: Final = "supertuner.tools.baseline.job"
PACKAGE_DIR: Final = Path(supertuner.__file__).resolve().parent


def current_code(environ: Mapping[str, str]) -> JobCommand:
    """The code that runs now."""
    return _job_command("the code here", sys.executable, PACKAGE_DIR.parent, environ)


@contextmanager
def other_code(code_name: str, environ: Mapping[str, str]) -> Iterator[JobCommand]:
    """Code by a name: a folder that holds the package, an environment's python, or a git revision of this checkout."""
    path = Path(code_name).expanduser()
    if code_name and (path / "supertuner").is_dir():
        _require_job_module(path, code_name)
        yield _job_command(f"the code in {path}", sys.executable, path.resolve(), environ)
    elif path.is_file():
        yield _job_command(f"the code of {path}", str(path.absolute()), None, environ)
    else:
        commit = resolve_commit(code_name)
        if commit is None:
            raise BaselineError(
                f"{code_name!r} is no folder with a supertuner in it, no python, and no git revision of {PACKAGE_DIR.parent}"
            )
        with TemporaryDirectory(prefix="supertuner-code-") as folder:
            _export_commit(commit, Path(folder))
            _require_job_module(Path(folder), code_name)
            yield _job_command(f"revision {commit[:10]}", sys.executable, Path(folder), environ)


def resolve_commit(revision: str) -> str | None:
    """The commit that a revision of this checkout is; None: no such, or no checkout."""
    if not (PACKAGE_DIR.parent / ".git").exists() or revision.startswith("-"):
        return None
    commit = _git_output("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    return commit or None


def current_commit() -> str | None:
    """The commit of the code that runs now, with `+` where files of the package are others; None: no checkout."""
    commit = resolve_commit("HEAD")
    if commit is None:
        return None
    return commit + ("+" if _git_output("status", "--porcelain", "--", "supertuner") else "")


def _job_command(title: str, python: str, path: Path | None, environ: Mapping[str, str]) -> JobCommand:
    child_environ = dict(environ)
    if path is not None:
        child_environ["PYTHONPATH"] = ":".join(
            [str(path), *([environ["PYTHONPATH"]] if environ.get("PYTHONPATH") else [])]
        )
    # -P: the folder that the command is given in must not come before it
    return JobCommand(title, (python, "-P", "-m", JOB_MODULE), child_environ, path)


def _export_commit(commit: str, folder: Path) -> None:
    """The package at a commit, with its libraries in C: those here where their sources are the same, else built."""
    archive = folder / "code.tar"
    _git_output("archive", "--format=tar", f"--output={archive}", commit, "supertuner", "setup.py", "pyproject.toml")
    unpacked = subprocess.run(["tar", "-xf", str(archive), "-C", str(folder)], capture_output=True, check=False)
    if unpacked.returncode != 0:  # git has left a file all the same
        lacks = "it lacks supertuner, setup.py or pyproject.toml"
        raise BaselineError(f"git cannot write out {commit[:10]}: {lacks}; name a later revision")
    archive.unlink()
    sources = [*PACKAGE_DIR.rglob("*.c"), *PACKAGE_DIR.rglob("*.h"), PACKAGE_DIR.parent / "setup.py"]
    root = PACKAGE_DIR.parent
    if all(_same_content(file, folder / file.relative_to(root)) for file in sources):
        for library in PACKAGE_DIR.rglob("*.so"):
            target = folder / library.relative_to(root)
            if target.parent.is_dir():
                shutil.copy2(library, target)
        return
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    built = subprocess.run(build, cwd=folder, capture_output=True, text=True, check=False)
    if built.returncode != 0:
        raise BaselineError(f"the C parts of {commit[:10]} cannot be built: {built.stderr.strip()[-500:]}")


def _same_content(file: Path, other: Path) -> bool:
    return other.is_file() and file.read_bytes() == other.read_bytes()


def _require_job_module(folder: Path, code_name: str) -> None:
    if not (folder / "supertuner/tools/baseline/job.py").is_file():
        raise BaselineError(f"{code_name} is older than baselines: it cannot be measured; name a later one")


def _git_output(*arguments: str) -> str:
    """What git says; nothing where it fails, or is not here."""
    try:
        completed = subprocess.run(
            ["git", "-C", str(PACKAGE_DIR.parent), *arguments], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return ""
    return completed.stdout.strip() if completed.returncode == 0 else ""
