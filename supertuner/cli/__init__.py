"""The command line: parses arguments, calls, prints. Commands import packages when they run, so --help is instant."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from supertuner.cli import (
    adapter,
    arena,
    baseline,
    cache,
    checkpoint,
    config,
    data,
    doctor,
    estimate,
    init,
    models,
    quickstart,
    run,
    sample,
    train,
)
from supertuner.core.errors import ConfigError, SuperTunerError
from supertuner.core.interrupts import interrupts_win
from supertuner.core.types import escape_lines

TRAIN_EXTRA_MODULES = frozenset(
    (
        "PIL", "accelerate", "av", "cramjam", "diffusers", "ftfy", "huggingface_hub", "lycoris", "matplotlib", "peft",
        "prodigyopt", "pyarrow", "pynvml", "safetensors", "schedulefree", "simplejpeg", "soundfile", "tensorboard",
        "torch", "torchao", "transformers",
    )
)  # fmt: skip
"""The modules of the packages of the extra `train` in pyproject.toml; a test compares the two."""

OPTION_BY_PARAMETER = {
    **dict.fromkeys(("force", "overwrite"), "--force"),
    "prompts": "--prompt",
    "seeds": "--seed",
    **{name: f"--{name}" for name in ("base", "expert", "family", "machine", "out", "partial", "strength")},
}
"""Parameters of the API that messages of errors name, and the options with the same meaning."""

app = typer.Typer(
    name="supertuner",
    help="Fine-tune diffusion models on machines whose CPU and GPU share memory.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
for command in (
    quickstart.quickstart, init.init, models.models, train.train, estimate.estimate, data.stage, data.preview,
    data.sample_data, run.validate, sample.sample, doctor.doctor, doctor.env,
):  # fmt: skip
    app.command()(command)
for group in (config, arena, cache, run, checkpoint, adapter, baseline):
    app.add_typer(group.app, name=group.__name__.rpartition(".")[2])


def _print_version(wanted: bool) -> None:
    if wanted:
        from supertuner import __version__

        typer.echo(f"supertuner {__version__}")
        raise typer.Exit


@app.callback()
def global_options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    from supertuner.config.sources.environment import current_environment
    from supertuner.config.sources.launcher import require_single_process

    if context.invoked_subcommand not in (None, "train"):
        require_single_process(current_environment(), context.invoked_subcommand)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command with these arguments, by default those of the process. Errors of users are printed as a message,
    never as a traceback."""
    try:
        with interrupts_win():
            app(arguments)
    except SuperTunerError as error:
        if not _is_reported_by_first_rank(error):
            typer.echo(escape_lines(with_options(str(error))), err=True)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in TRAIN_EXTRA_MODULES:
            raise
        typer.echo(missing_extra_text(sys.argv[1:] if arguments is None else arguments), err=True)
        sys.exit(2)
    except OSError as error:  # one that no package handles: print the file and the system's reason
        where = f"{error.filename}: " if error.filename is not None else ""
        problem = f"{where}{error.strerror or error}"
        typer.echo(escape_lines(f"{problem}; the system refused this, and the command cannot continue"), err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        sys.exit(130)


def with_options(message: str) -> str:
    """The message of an error with the command line's options in place of the API's parameters (`overwrite`)."""
    return re.sub(r"`(\w+)`", lambda match: OPTION_BY_PARAMETER.get(match[1], match[0]), message)


def missing_extra_text(arguments: Sequence[str]) -> str:
    """The message of a command that lacks a package of the extra `train`."""
    command = " ".join(["supertuner", *(word for word in arguments[:1] if not word.startswith("-"))])
    return f"{command} needs the extra \"train\": pip install 'supertuner[train]'"


def _is_reported_by_first_rank(error: SuperTunerError) -> bool:
    """Whether this is a configuration error on a local rank other than 0: all ranks of the node have it, rank 0
    prints."""
    from supertuner.config.sources.environment import current_environment
    from supertuner.config.sources.launcher import LOCAL_RANK

    return isinstance(error, ConfigError) and current_environment().get(LOCAL_RANK, "0") not in ("", "0")
