"""Finds the code to measure: the current one, a git revision of this checkout, another checkout or environment.

Another revision is exported into a temporary folder and never checked out: the working tree stays untouched.
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
    """The package that this process runs."""
    return _job_command("the current code", sys.executable, PACKAGE_DIR.parent, environ)


@contextmanager
def other_code(code_name: str, environ: Mapping[str, str]) -> Iterator[JobCommand]:
    """Code by name: a folder that holds the package, the python of another environment, or a git revision of this
    checkout. Raises BaselineError if the name is none of these, or if that code is older than baselines."""
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
                f"{code_name!r} is not a folder with a supertuner package, not a python, and not a git revision of "
                f"{PACKAGE_DIR.parent}; name one of these"
            )
        with TemporaryDirectory(prefix="supertuner-code-") as folder:
            _export_commit(commit, Path(folder))
            _require_job_module(Path(folder), code_name)
            yield _job_command(f"revision {commit[:10]}", sys.executable, Path(folder), environ)


def resolve_commit(revision: str) -> str | None:
    """The commit hash of a revision of this checkout; None if there is no such revision or no checkout."""
    if not (PACKAGE_DIR.parent / ".git").exists() or revision.startswith("-"):
        return None
    commit = _git_output("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    return commit or None


def current_commit() -> str | None:
    """The commit of the current code, with `+` if the package has uncommitted changes; None without a checkout."""
    commit = resolve_commit("HEAD")
    if commit is None:
        return None
    return commit + ("+" if _git_output("status", "--porcelain", "--", "supertuner") else "")


def _job_command(title: str, python: str, path: Path | None, environ: Mapping[str, str]) -> JobCommand:
    child_environ = dict(environ)
    if path is not None:
        child_environ["PYTHONPATH"] = ":".join(filter(None, (str(path), environ.get("PYTHONPATH"))))
    # -P keeps the working directory off sys.path, where another supertuner could shadow the requested one.
    return JobCommand(title, (python, "-P", "-m", JOB_MODULE), child_environ, path)


def _export_commit(commit: str, folder: Path) -> None:
    """Export the package at a commit. Its C libraries are copied from here if their sources are equal, else built."""
    archive = folder / "code.tar"
    _git_output("archive", "--format=tar", f"--output={archive}", commit, "supertuner", "setup.py", "pyproject.toml")
    unpacked = subprocess.run(["tar", "-xf", str(archive), "-C", str(folder)], capture_output=True, check=False)
    if unpacked.returncode != 0:  # git archive fails after it has created an empty file
        reason = "it lacks supertuner, setup.py or pyproject.toml"
        raise BaselineError(f"git cannot export {commit[:10]}: {reason}; name a later revision")
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
        raise BaselineError(f"the C extensions of {commit[:10]} cannot be built: {built.stderr.strip()[-500:]}")


def _same_content(file: Path, other: Path) -> bool:
    return other.is_file() and file.read_bytes() == other.read_bytes()


def _require_job_module(folder: Path, code_name: str) -> None:
    if not (folder / "supertuner/tools/baseline/job.py").is_file():
        raise BaselineError(f"{code_name} has no `supertuner baseline` yet and cannot be measured; name later code")


def _git_output(*arguments: str) -> str:
    """The standard output of a git command; empty if it fails or git is not installed."""
    command = ["git", "-C", str(PACKAGE_DIR.parent), *arguments]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return completed.stdout.strip() if completed.returncode == 0 else ""
