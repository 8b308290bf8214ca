"""`supertuner config`: check, show and convert a configuration, and print its JSON Schema."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from supertuner.config.sources.load import Loaded
    from supertuner.core.events import Warned

app = typer.Typer(help="Check, show and convert configurations.", no_args_is_help=True)

File = Annotated[Path, typer.Argument(help="A .json, .yaml or .toml file.", show_default=False)]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Set one value, such as train.batch_size=4.")
]
NoPaths = Annotated[bool, typer.Option("--no-paths", help="Accept datasets that are not on this machine.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class Language(StrEnum):
    JSON = "json"
    YAML = "yaml"
    TOML = "toml"


@app.command()
def validate(
    configs: Annotated[list[Path], typer.Argument(metavar="CONFIG...", show_default=False)],
    sets: Sets = None,
    no_paths: NoPaths = False,
    as_json: AsJson = False,
) -> None:
    """Check configurations. Prints every problem of every file; exit code 2 if there is one."""
    from supertuner.core.errors import ConfigError

    reports = []
    failed = False
    for path in configs:
        try:
            loaded = _load(path, sets, no_paths)
        except ConfigError as error:
            failed = True
            problems = [{"path": p.path, "message": p.message} for p in error.problems]
            reports.append({"config": str(path), "valid": False, "problems": problems})
            if not as_json:
                typer.echo(str(error), err=True)
            continue
        notes = [{"what": note.what, "message": note.message} for note in loaded.notes]
        reports.append({"config": str(path), "valid": True, "notes": notes})
        if not as_json:
            _print_notes(loaded)
            typer.echo(f"{loaded.source} is valid: {_summary(loaded)}")
    if as_json:
        typer.echo(json.dumps(reports, indent=2, ensure_ascii=False))
    if failed:
        raise typer.Exit(2)


@app.command()
def show(
    config: Annotated[Path | None, typer.Argument(show_default=False)] = None,
    sets: Sets = None,
    origins: Annotated[bool, typer.Option("--origins", help="Say where each value came from.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Show defaults too.")] = False,
    no_paths: NoPaths = False,
    as_json: AsJson = False,
) -> None:
    """Print the settings in force, in our own names."""
    loaded = _load(config, sets, no_paths)
    if as_json:
        typer.echo(json.dumps(loaded.resolved(), indent=2, ensure_ascii=False))
        return
    shown = [(p, json.dumps(v, ensure_ascii=False), o) for p, v, o in loaded.leaves() if everything or o != "default"]
    width = max((len(path) + len(value) for path, value, _ in shown), default=0)
    for path, value, origin in shown:
        line = f"{path} = {value}"
        typer.echo(f"{line.ljust(min(width, 70) + 3)}   {origin}" if origins else line)


@app.command()
def convert(
    file: File,
    to: Annotated[
        Language | None, typer.Option("--to", help="Language; from the ending of OUT, else the file's.")
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="File to write; else standard output.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite OUT.")] = False,
    sets: Sets = None,
) -> None:
    """Write a configuration in our own names. Paths are relative to OUT, or without it to FILE's folder."""
    from supertuner.config.render import canonical, rendered
    from supertuner.core import durable
    from supertuner.core.errors import SuperTunerError

    loaded = _load(file, sets, no_paths=True)
    language = to or _language(out or file)
    text = rendered(canonical(loaded.values, (out or file).absolute().parent), language.value)
    _print_notes(loaded, err=True)
    if out is None:
        typer.echo(text, nl=False)
        return
    if _language(out) is not language:
        raise SuperTunerError(f"{out} does not end as {language.value} does; give --to and -o that agree")
    if out.exists() and not force:
        raise SuperTunerError(f"{out} exists; give --force to overwrite it")
    if not out.parent.is_dir():
        raise SuperTunerError(f"{out.parent} is not a folder; make it first")
    durable.write_text(out, text)


@app.command()
def schema() -> None:
    """Print the JSON Schema of a configuration, for editors."""
    from supertuner.config.schema import json_schema_text

    typer.echo(json_schema_text(), nl=False)


def _load(path: Path | None, sets: list[str] | None, no_paths: bool) -> Loaded:
    from supertuner.config.sources.load import load

    return load(path, sets=sets or (), check_paths=not no_paths)


def _language(path: Path) -> Language:
    from supertuner.core.errors import SuperTunerError

    ending = path.suffix.lower().lstrip(".").replace("yml", "yaml")
    if ending not in list(Language):
        raise SuperTunerError(f"{path}: the ending says the language; one of .json, .yaml, .toml")
    return Language(ending)


def _print_notes(loaded: Loaded, err: bool = False) -> None:
    """One line per message; keys with the same message share it."""
    by_message: dict[str, list[Warned]] = {}
    for note in loaded.notes:
        by_message.setdefault(note.message, []).append(note)
    for message, notes in by_message.items():
        typer.echo(f"  note: {', '.join(note.what for note in notes)}: {message}", err=err)


def _summary(loaded: Loaded) -> str:
    datasets = len(loaded.config.datasets)
    given = len(loaded.origins)
    return f"{datasets} dataset{'s' * (datasets != 1)}, {given} setting{'s' * (given != 1)} given"
