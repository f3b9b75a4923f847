"""The command line.

    session        a connection to a server: problem documents become sentences, exit statuses
    options        how values are written on the command line
    output         how answers are shown: tables for people, JSON for programs
    messages       publish, replace, get, cancel, move, list
    bulk           publish-many, cancel-many
    subscriptions  subscribe, subscriptions
    pulling        pull, ack, nack, extend
    dead_letters   dead-letters
    timers         heartbeat put, heartbeat get, heartbeat delete, event
    operations     stats, forecast, ready, check, repair
    tokens         token create, token list, token revoke
    pipeline       jobs on Apache Spark: pipeline audit, pipeline forecast
    pipeline_load  pipeline load
    pipeline_archive  pipeline archive
    pipeline_lateness pipeline lateness
    serve          serve: every setting is an option
    demo           a small shop, and a server that is killed in the middle

Exit status: 0 done, 1 refused by the server (or: damage found), 2 wrong usage, 3 no server there.

Cost: 0.5 s to start, most of it the settings' imports; what a command alone needs is imported
inside it, and `serve` leaves the other commands out. Threads: one.
"""

import gc
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Annotated

import typer

import delayserver
from delayserver.cli.output import help_text

MODULES = (
    "serve",
    "messages",
    "bulk",
    "subscriptions",
    "pulling",
    "dead_letters",
    "timers",
    "operations",
    "tokens",
    "pipeline",
    "pipeline_archive",
    "pipeline_lateness",
    "pipeline_load",
    "demo",
)
"""Each adds its commands, in the order of the help."""

HELP = """Publish a message now, receive it on time, once, and lose nothing in a crash.

Try `delayserver demo`, or start a server with `delayserver serve`. Commands that talk to a server
find it at --url (DELAYSERVER_URL) and show themselves with --token (DELAYSERVER_TOKEN); with --json
they print what the server answered."""


def make_app(modules: Iterable[str] = MODULES) -> typer.Typer:
    """The command line, with the commands of these modules."""
    app = typer.Typer(
        name="delayserver",
        help=help_text(HELP),
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name in modules:
        import_module(f"delayserver.cli.{name}").register(app)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"delayserver {delayserver.__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    pass


def main() -> None:
    """The entry point of the command `delayserver`."""
    modules: Iterable[str] = MODULES
    if sys.argv[1:2] == ["serve"]:
        modules = ("serve",)
        # What a start makes lives until the end; `delayserver.api.process` turns the collector
        # on again.
        gc.disable()
    make_app(modules)(prog_name="delayserver")
