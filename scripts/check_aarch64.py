"""Checks that every run-time dependency has a wheel for aarch64 (a GH200 is an ARM machine), or a stated fallback.

For each supported Python it queries the package index for a wheel for aarch64 Linux, or a pure one, of the version in
constraints.txt. It follows dependencies of dependencies and evaluates their markers for that machine. The result is
stored in scripts/aarch64_wheels.json together with a digest of its inputs, so a check costs nothing until
pyproject.toml or constraints.txt changes; `--refresh` queries the index again.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PROOF = ROOT / "scripts/aarch64_wheels.json"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
# glibc 2.35 is that of Ubuntu 22.04, the oldest supported system: any manylinux tag up to it loads there.
PLATFORMS = ("manylinux2014_aarch64", *(f"manylinux_2_{minor}_aarch64" for minor in range(17, 36)))
# Installs that are allowed without a wheel: (package, Python) → what happens instead.
FALLBACKS: Mapping[tuple[str, str], str] = {}
# A pure package that every index has: if it is not found, the index is unreachable.
PROBE_PACKAGE = "pip"


class PackageIndexUnreachable(Exception):
    """The package index did not answer, so nothing is known."""


@dataclass(frozen=True, slots=True)
class WheelInfo:
    file: str
    requires: tuple[str, ...]


def question_digest(pyproject: str, constraints: str, wheels: Mapping[str, Mapping[str, str]]) -> str:
    """A digest of everything that the result depends on: requirements, pins of the packages in the result, Pythons,
    platforms and fallbacks.

    A package can enter the result only through one of these, so the versions of development tools do not matter.
    """
    packages = {name for found in wheels.values() for name in found}
    pins = sorted(pin for name, pin in constraint_pins(constraints).items() if name in packages)
    requirements = runtime_requirements(tomllib.loads(pyproject)["project"])
    parts = [requirements, pins, PYTHONS, PLATFORMS, [[*k, v] for k, v in FALLBACKS.items()]]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def runtime_requirements(project: Mapping[str, Any]) -> list[str]:
    """What a user installs: the dependencies and every extra except those for development."""
    extras = project.get("optional-dependencies", {})
    extra_lines = (line for name, lines in extras.items() if name not in ("dev", "docs") for line in lines)
    return sorted({*project["dependencies"], *extra_lines})


def constraint_pins(text: str) -> dict[str, str]:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return {normal(name): f"{name}=={version}" for name, version in (line.split("==", 1) for line in lines)}


def normal(name: str) -> str:
    """The canonical spelling of a package name: `PyYAML` and `pyyaml` are the same."""
    return str(canonicalize_name(name))


def applies(requirement: Requirement, python: str, extras: Sequence[str]) -> bool:
    """Whether an aarch64 Linux machine with that Python needs the requirement."""
    if requirement.marker is None:
        return True
    machine = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "implementation_version": f"{python}.0",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "platform_machine": "aarch64",
        "platform_system": "Linux",
        "sys_platform": "linux",
        "os_name": "posix",
    }
    return any(requirement.marker.evaluate({**machine, "extra": extra}) for extra in ("", *extras))


def prove(requirements: Sequence[str], pins: Mapping[str, str], python: str) -> tuple[dict[str, str], list[str]]:
    """(package → wheel file or fallback, missing packages) for one Python, including indirect dependencies."""
    found: dict[str, str] = {}
    missing: list[str] = []
    wave = {normal(r.name): r for r in map(Requirement, requirements) if applies(r, python, ())}
    while wave:
        versions = {name: pins.get(name, f"{r.name}{r.specifier}") for name, r in wave.items()}
        wheels = find_wheels(versions, python)
        following: dict[str, Requirement] = {}
        for name, requirement in wave.items():
            wheel = wheels.get(name)
            if wheel is None:
                fallback = FALLBACKS.get((name, python))
                found[name] = f"fallback: {fallback}"
                if fallback is None:
                    missing.append(f"{versions[name]} for Python {python}")
                continue
            found[name] = wheel.file
            for below in map(Requirement, wheel.requires):
                if applies(below, python, tuple(requirement.extras)):
                    following.setdefault(normal(below.name), below)
        wave = {name: r for name, r in following.items() if name not in found}
    return dict(sorted(found.items())), missing


def find_wheels(versions: Mapping[str, str], python: str) -> dict[str, WheelInfo]:
    """The wheels of these packages. One query asks for all; if it fails, each package is queried separately."""
    together = query_index(list(versions.values()), python)
    if together is not None:
        return together
    if query_index([PROBE_PACKAGE], python) is None:
        raise PackageIndexUnreachable
    wheels: dict[str, WheelInfo] = {}
    for requirement in versions.values():
        wheels.update(query_index([requirement], python) or {})
    return wheels


def query_index(requirements: Sequence[str], python: str) -> dict[str, WheelInfo] | None:
    """What pip would install on that machine; None if one of the packages has no wheel."""
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    with tempfile.TemporaryDirectory() as nowhere:
        options = [
            "--quiet",
            "--dry-run",
            "--no-deps",
            "--ignore-installed",
            "--only-binary=:all:",
            "--target",
            nowhere,
        ]
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *options]
        command += ["--report", f"{nowhere}/report.json", "--python-version", python, *platforms, *requirements]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return None
        report = json.loads(Path(nowhere, "report.json").read_text())
    wheels = {}
    for item in report["install"]:
        file = item["download_info"]["url"].rsplit("/", 1)[-1]
        metadata = item["metadata"]
        wheels[normal(metadata["name"])] = WheelInfo(file, tuple(metadata.get("requires_dist", ())))
    return wheels


def prove_all(pyproject: str, constraints: str) -> tuple[dict[str, dict[str, str]], list[str]]:
    requirements = runtime_requirements(tomllib.loads(pyproject)["project"])
    pins = constraint_pins(constraints)
    print(f"aarch64: querying the package index for Python {', '.join(PYTHONS)}; this takes minutes")
    if query_index([PROBE_PACKAGE], PYTHONS[0]) is None:
        raise PackageIndexUnreachable
    with ThreadPoolExecutor(len(PYTHONS)) as pool:
        answers = list(pool.map(lambda python: prove(requirements, pins, python), PYTHONS))
    wheels = {python: found for python, (found, _) in zip(PYTHONS, answers, strict=True)}
    return wheels, [line for _, missing in answers for line in missing]


def main(arguments: Sequence[str]) -> int:
    pyproject = (ROOT / "pyproject.toml").read_text()
    constraints = (ROOT / "constraints.txt").read_text()
    proof = json.loads(PROOF.read_text()) if PROOF.exists() else {"wheels": {}}
    if proof.get("digest") != question_digest(pyproject, constraints, proof["wheels"]) or "--refresh" in arguments:
        try:
            wheels, missing = prove_all(pyproject, constraints)
        except PackageIndexUnreachable:
            print("aarch64: the dependencies changed, but the package index is unreachable;", file=sys.stderr)
            print("run `python scripts/check_aarch64.py` with a network, and commit the result", file=sys.stderr)
            return 1
        if missing:
            print("aarch64: no wheel, and no fallback stated in scripts/check_aarch64.py:", file=sys.stderr)
            print("\n".join(f"  {line}" for line in missing), file=sys.stderr)
            return 1
        proof = {"digest": question_digest(pyproject, constraints, wheels), "wheels": wheels}
        PROOF.write_text(json.dumps(proof, indent=1) + "\n")
    packages = {name for found in proof["wheels"].values() for name in found}
    print(
        f"aarch64: {len(packages)} run-time packages have a wheel or a stated fallback on Python {', '.join(PYTHONS)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
