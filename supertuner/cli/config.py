"""`supertuner config`: validate, show and convert configurations, and print their JSON Schema."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from supertuner.cli.options import ConfigArgument, JsonOption, SetOption
from supertuner.core.types import escape_lines

if TYPE_CHECKING:
    from supertuner.config.sources.load import LoadedConfig

app = typer.Typer(help="Validate, show and convert configurations.", no_args_is_help=True)

NoPathsOption = Annotated[bool, typer.Option("--no-paths", help="Accept datasets that are not on this machine.")]


class LanguageChoice(StrEnum):
    JSON = "json"
    YAML = "yaml"
    TOML = "toml"


@app.command()
def validate(
    configs: Annotated[list[Path], typer.Argument(metavar="CONFIG...", show_default=False)],
    sets: SetOption = None,
    no_paths: NoPathsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Validate configurations. Prints every problem of every file, and exits with 2 if there is one."""
    from supertuner.core.errors import ConfigError

    reports = []
    failed = False
    for path in configs:
        try:
            loaded = _load(path, sets, no_paths)
        except ConfigError as error:
            failed = True
            problems = [{"path": p.path, "message": p.message} for p in error.problems]
            notes = [{"what": note.path, "message": note.message} for note in error.notes]
            reports.append({"config": str(path), "valid": False, "problems": problems, "notes": notes})
            if not as_json:
                typer.echo(escape_lines(str(error)), err=True)
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
    sets: SetOption = None,
    origins: Annotated[bool, typer.Option("--origins", help="Show where each value comes from.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Show defaults too.")] = False,
    no_paths: NoPathsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Print the effective settings under SuperTuner's own names."""
    loaded = _load(config, sets, no_paths)
    if as_json:
        typer.echo(json.dumps(loaded.to_dict(), indent=2, ensure_ascii=False))
        return
    settings = (setting for setting in loaded.iter_settings() if everything or setting[2] != "default")
    rows = [(path, json.dumps(value, ensure_ascii=False), origin) for path, value, origin in settings]
    width = max((len(path) + len(value) for path, value, _ in rows), default=0)
    for path, value, origin in rows:
        line = f"{path} = {value}"
        typer.echo(f"{line.ljust(min(width, 70) + 3)}   {origin}" if origins else line)


@app.command()
def convert(
    file: ConfigArgument,
    to: Annotated[
        LanguageChoice | None,
        typer.Option("--to", help="The format to write. Default: that of OUT's extension, else FILE's."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="The file to write. Default: standard output.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite OUT.")] = False,
    sets: SetOption = None,
) -> None:
    """Write a configuration under SuperTuner's own names. Paths become relative to the folder of OUT, else of FILE."""
    from supertuner.api.configuration import render_config
    from supertuner.core import durable
    from supertuner.core.errors import SuperTunerError

    loaded = _load(file, sets, no_paths=True)
    language = to or _language_from_suffix(out or file)
    text = render_config(loaded, language.value, folder=(out or file).parent)
    _print_notes(loaded, err=True)
    if out is None:
        typer.echo(text, nl=False)
        return
    if _language_from_suffix(out) is not language:
        raise SuperTunerError(f"{out} does not have the extension of {language.value}; make --to and -o agree")
    if out.exists() and not force:
        raise SuperTunerError(f"{out} exists; use --force to overwrite it")
    if not out.parent.is_dir():
        raise SuperTunerError(f"{out.parent} is not a folder; create it first")
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

    extension = path.suffix.lower().lstrip(".").replace("yml", "yaml")
    if extension not in list(LanguageChoice):
        raise SuperTunerError(f"{path}: the format follows from the extension, which must be .json, .yaml or .toml")
    return LanguageChoice(extension)


def _print_notes(loaded: LoadedConfig, err: bool = False) -> None:
    """Print one line per message; keys with the same message share a line."""
    from supertuner.config.sources.load import group_notes

    for note in group_notes(loaded.notes):
        typer.echo(escape_lines(f"  {note}"), err=err)


def _summary(loaded: LoadedConfig) -> str:
    datasets, settings = len(loaded.config.datasets), len(loaded.origins)
    return f"{datasets} dataset{'s' * (datasets != 1)}, {settings} setting{'s' * (settings != 1)}"
