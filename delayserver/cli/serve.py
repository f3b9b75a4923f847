"""serve: run a server. Every field of Settings is an option; the rest is the settings' business.

An option that is not given is not passed on, so that flags come before the environment, the
environment before the TOML file, and that before the defaults. Values go on as text: one place, the
settings, reads them and reports their errors.

Cost: none that lasts. Threads: the server's own.
"""

import contextlib
import difflib
import inspect
import os
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_origin

import typer
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from delayserver.cli.command_options import use_signature
from delayserver.cli.output import help_text
from delayserver.config import Settings, by_heading
from delayserver.errors import InputError
from delayserver.times import format_duration

USAGE_STATUS = 2
ENVIRONMENT_PREFIX = "DELAYSERVER_"
_OF_COMMANDS = (
    *("CLIENT_CERT", "CLIENT_KEY", "CONFIG", "TLS_CA", "URL"),
    *("WEBHOOK_SECRET", "WEBHOOK_PREVIOUS_SECRET", "BROKER_PASSWORD"),
)
"""Variables of other commands."""
HELP = """Run a server, until it is told to stop (SIGTERM, or ctrl-C).

Each option may also be given as a variable (--data-dir as DELAYSERVER_DATA_DIR), or in a TOML file
(data_dir = "…"): flags win over variables, variables over the file. Durations are milliseconds or
text such as 500ms, 10m, 2d. On an address that others can reach, a token is needed."""

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", envvar="DELAYSERVER_CONFIG", help="TOML file with settings."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    parameters = [
        inspect.Parameter(
            "config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ConfigOption
        ),
        *(
            _parameter(name, Settings.model_fields[name], heading.value)
            for heading, names in by_heading().items()
            for name in names
        ),
    ]
    use_signature(serve, parameters)
    examples = (
        "serve --port 9000 --data-dir /var/lib/delayserver",
        "serve --config delayserver.toml --retention-ms 7d",
        "serve --data-dir /var/lib/delayserver --shards 8",
    )
    app.command("serve", help=help_text(HELP, *examples))(serve)


def serve(config: Path | None = None, **options: Any) -> None:
    """Run a server; `options` are fields of Settings, None where an option was not given."""
    given = {name: value for name, value in options.items() if value is not None}
    settings = settings_or_exit(given, config)
    with contextlib.suppress(OSError):  # A log that cannot be written does not end the start.
        for line in misspelt(os.environ):
            typer.echo(f"warning: {line}", err=True)

    if settings.shards > 1 or settings.cluster is not None:
        from delayserver.serve.supervisor import supervise as run
    else:
        from delayserver.serve.process import serve as run  # the wiring: all that a server needs

    raise SystemExit(run(settings))


def settings_or_exit(given: Mapping[str, Any], config: Path | None) -> Settings:
    """The settings of a server that is started with these options. Errors in them are printed, and
    the command ends."""
    try:
        return Settings(**{**given, "config": config})
    except InputError as error:
        typer.echo(f"error: {error.detail}", err=True)
        raise typer.Exit(USAGE_STATUS) from error
    except ValidationError as error:
        for line in _complaints(error, given, config):
            typer.echo(f"error: {line}", err=True)
        raise typer.Exit(USAGE_STATUS) from error


# ---- from a field to an option -----------------------------------------------------------------


def flag(name: str) -> str:
    """`data_dir` as `--data-dir`."""
    return "--" + name.replace("_", "-")


def _parameter(name: str, field: FieldInfo, heading: str) -> inspect.Parameter:
    annotation: Any = str | None
    declarations: tuple[str, ...] = (flag(name),)
    metavar: str | None = _metavar(name, field)
    if field.annotation is bool:
        annotation, metavar = bool | None, None
        declarations = (f"{flag(name)}/--no-{name.replace('_', '-')}",)
    elif get_origin(field.annotation) is tuple:
        annotation = list[str] | None
    option = typer.Option(
        *declarations,
        metavar=metavar,
        help=_help(name, field),
        show_default=False,
        rich_help_panel=heading,
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[annotation, option],
    )


def _metavar(name: str, field: FieldInfo) -> str:
    if isinstance(field.annotation, type) and issubclass(field.annotation, Enum):
        return "|".join(str(choice.value) for choice in field.annotation)
    if name.endswith("_dir"):
        return "DIRECTORY"
    if field.annotation == Path | None:
        return "FILE"
    if field.annotation is int:
        return "DURATION" if name.endswith("_ms") else "BYTES" if name.endswith("bytes") else "N"
    return "TEXT"


def _help(name: str, field: FieldInfo) -> str:
    text = field.description or ""
    default = _default(name, field.default)
    return text if default is None else rf"{text} \[default: {default}]"


def _default(name: str, default: Any) -> str | None:
    if default is None or default == () or isinstance(default, bool):
        return None
    if isinstance(default, Enum):
        return str(default.value)
    if isinstance(default, int) and name.endswith("_ms"):
        return format_duration(default)
    return str(default)


def misspelt(variables: Iterable[str]) -> list[str]:
    """A line for each variable that looks like a setting and is none. It is no error: a container
    may be given such variables by others (Kubernetes makes DELAYSERVER_SERVICE_HOST of a service's
    name)."""
    known = {ENVIRONMENT_PREFIX + name.upper() for name in Settings.model_fields}
    known |= {ENVIRONMENT_PREFIX + name for name in _OF_COMMANDS}
    lines = []
    for name in sorted(variables):
        if name.startswith(ENVIRONMENT_PREFIX) and name not in known:
            close = difflib.get_close_matches(name, known, 1)
            lines.append(f"{name} is no setting" + (f": is it {close[0]}?" if close else ""))
    return lines


# ---- errors ------------------------------------------------------------------------------------


def _complaints(
    error: ValidationError, given: Mapping[str, object], config: Path | None
) -> list[str]:
    """A line for each wrong setting, that names it as it was given."""
    lines = []
    for one in error.errors(include_url=False):
        message = one["msg"].removeprefix("Value error, ")
        if not one["loc"]:  # how settings relate to each other
            lines.append(message)
            continue
        name = str(one["loc"][0])
        value = "" if name == "token" or one["input"] is None else f" (given: {one['input']})"
        lines.append(f"{_source(name, given, config)}: {message}{value}")
    return lines


def _source(name: str, given: Mapping[str, object], config: Path | None) -> str:
    if name in given:
        return flag(name)
    variable = ENVIRONMENT_PREFIX + name.upper()
    if any(known.upper() == variable for known in os.environ):
        return variable
    return name if config is None else f"{name} in {config}"
