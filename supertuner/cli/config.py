"""`supertuner config`: check, show and convert a configuration, and print its JSON Schema."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from supertuner.config.sources.load import LoadedConfig
    from supertuner.core.events import WarningEvent

app = typer.Typer(help="Check, show and convert configurations.", no_args_is_help=True)

ConfigFileArgument = Annotated[Path, typer.Argument(help="A .json, .yaml or .toml file.", show_default=False)]
ConfigSetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Set one value, such as train.batch_size=4.")
]
NoPathsOption = Annotated[bool, typer.Option("--no-paths", help="Accept datasets that are not on this machine.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class LanguageChoice(StrEnum):
    JSON = "json"
    YAML = "yaml"
    TOML = "toml"


@app.command()
def validate(
    configs: Annotated[list[Path], typer.Argument(metavar="CONFIG...", show_default=False)],
    sets: ConfigSetOption = None,
    no_paths: NoPathsOption = False,
    as_json: JsonOption = False,
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
            typer.echo(f"{loaded.source_name} is valid: {_summary(loaded)}")
    if as_json:
        typer.echo(json.dumps(reports, indent=2, ensure_ascii=False))
    if failed:
        raise typer.Exit(2)


@app.command()
def show(
    config: Annotated[Path | None, typer.Argument(show_default=False)] = None,
    sets: ConfigSetOption = None,
    origins: Annotated[bool, typer.Option("--origins", help="Say where each value came from.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Show defaults too.")] = False,
    no_paths: NoPathsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Print the settings in force, in our own names."""
    loaded = _load(config, sets, no_paths)
    if as_json:
        typer.echo(json.dumps(loaded.to_dict(), indent=2, ensure_ascii=False))
        return
    rows = [
        (p, json.dumps(v, ensure_ascii=False), o) for p, v, o in loaded.iter_settings() if everything or o != "default"
    ]
    width = max((len(path) + len(value) for path, value, _ in rows), default=0)
    for path, value, origin in rows:
        line = f"{path} = {value}"
        typer.echo(f"{line.ljust(min(width, 70) + 3)}   {origin}" if origins else line)


@app.command()
def convert(
    file: ConfigFileArgument,
    to: Annotated[
        LanguageChoice | None, typer.Option("--to", help="Language; from the ending of OUT, else the file's.")
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="File to write; else standard output.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite OUT.")] = False,
    sets: ConfigSetOption = None,
) -> None:
    """Write a configuration in our own names. Paths are relative to OUT, or without it to FILE's folder."""
    from supertuner.config.sources.render import canonical_tree, render_tree
    from supertuner.core import durable
    from supertuner.core.errors import SuperTunerError

    loaded = _load(file, sets, no_paths=True)
    language = to or _language_from_suffix(out or file)
    text = render_tree(canonical_tree(loaded.provenance, (out or file).absolute().parent), language.value)
    _print_notes(loaded, err=True)
    if out is None:
        typer.echo(text, nl=False)
        return
    if _language_from_suffix(out) is not language:
        raise SuperTunerError(f"{out} does not end as {language.value} does; give --to and -o that agree")
    if out.exists() and not force:
        raise SuperTunerError(f"{out} exists; give --force to overwrite it")
    if not out.parent.is_dir():
        raise SuperTunerError(f"{out.parent} is not a folder; make it first")
    durable.write_text(out, text)


@app.command()
def schema() -> None:
    """Print the JSON Schema of a configuration, for editors."""
    from supertuner.config.settings.run_config import json_schema_text

    typer.echo(json_schema_text(), nl=False)


def _load(path: Path | None, sets: list[str] | None, no_paths: bool) -> LoadedConfig:
    from supertuner.config.sources.load import load_config

    return load_config(path, sets=sets or (), check_paths=not no_paths)


def _language_from_suffix(path: Path) -> LanguageChoice:
    from supertuner.core.errors import SuperTunerError

    ending = path.suffix.lower().lstrip(".").replace("yml", "yaml")
    if ending not in list(LanguageChoice):
        raise SuperTunerError(f"{path}: the ending says the language; one of .json, .yaml, .toml")
    return LanguageChoice(ending)


def _print_notes(loaded: LoadedConfig, err: bool = False) -> None:
    """One line per message; keys with the same message share it."""
    by_message: dict[str, list[WarningEvent]] = {}
    for note in loaded.notes:
        by_message.setdefault(note.message, []).append(note)
    for message, notes in by_message.items():
        typer.echo(f"  note: {', '.join(note.what for note in notes)}: {message}", err=err)


def _summary(loaded: LoadedConfig) -> str:
    dataset_count = len(loaded.config.datasets)
    setting_count = len(loaded.origins)
    return f"{dataset_count} dataset{'s' * (dataset_count != 1)}, {setting_count} setting{'s' * (setting_count != 1)} given"
