"""The command line.

    session        a connection to a server: problem documents become sentences, exit statuses
    command_options  options that are the fields of a struct
    options        how values are written on the command line
    output         how answers are shown: tables for people, JSON for programs
    messages       publish, replace, get, cancel, move, list
    bulk           publish-many, cancel-many
    subscriptions  subscribe, subscriptions
    pulling        pull, ack, nack, extend
    dead_letters   dead-letters
    (parts)        the commands of each part: `delayserver.parts.commands`
    operations     stats, forecast, shards, ready, check, repair
    backups        backup, backups list, backups delete, restore
    tokens         token create, token list, token revoke, token export, token import
    cluster        cluster create, status, move, drain, forget, adopt
    pipeline       jobs on Apache Spark: pipeline audit, pipeline forecast
    pipeline_load  pipeline load
    pipeline_archive  pipeline archive
    pipeline_export  pipeline export
    pipeline_lateness pipeline lateness
    pipeline_watch  pipeline watch
    serve          serve: every setting is an option
    named          list, show, pause, resume, delete of definitions under names
    here           the server that the settings of this environment start
    demo           a small shop, and a server that is killed in the middle

Exit status: 0 done, 1 refused by the server (or: damage found), 2 wrong usage, 3 no server there,
130 stopped with ctrl-C (docs/operations.md).

Cost: 0.2 s to start a command of one of these modules, since only it is imported, and 0.5 s to
list them all. Threads: one.
"""

import gc
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Annotated, Final

import typer

import delayserver
from delayserver.cli.command_options import with_options
from delayserver.cli.output import help_text
from delayserver.cli.session import ConnectionOptions
from delayserver.parts.commands import COMMANDS as PART_COMMANDS

COMMANDS: Final = {
    "serve": ("serve",),
    "messages": ("publish", "replace", "get", "cancel", "move", "list"),
    "bulk": ("publish-many", "cancel-many"),
    "subscriptions": ("subscribe", "subscriptions"),
    "pulling": ("pull", "ack", "nack", "extend"),
    "dead_letters": ("dead-letters",),
    **PART_COMMANDS,
    "operations": (
        *("stats", "subjects", "forecast", "shards", "whoami"),
        *("ready", "check", "repair"),
    ),
    "backups": ("backup", "backups", "restore"),
    "tokens": ("token",),
    "cluster": ("cluster",),
    "pipeline": ("pipeline",),
    "pipeline_archive": ("pipeline",),
    "pipeline_export": ("pipeline",),
    "pipeline_lateness": ("pipeline",),
    "pipeline_load": ("pipeline",),
    "pipeline_watch": ("pipeline",),
    "demo": ("demo",),
}
"""The commands of each module, in the order of the help."""

HELP = """Publish a message now, receive it on time, once, and lose nothing in a crash.

Try `delayserver demo`, or start a server with `delayserver serve`. Commands that talk to a server
find it at --url (DELAYSERVER_URL) and show themselves with --token (DELAYSERVER_TOKEN); with --json
they print the answer of the server.

Exit status: 0 done, 1 refused (or: damage found), 2 wrong usage, 3 no server there."""


def make_app(modules: Iterable[str] = tuple(COMMANDS)) -> typer.Typer:
    """The command line, with the commands of these modules."""
    app = typer.Typer(
        name="delayserver",
        help=help_text(HELP),
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name in modules:
        import_module(name if name in PART_COMMANDS else f"delayserver.cli.{name}").register(app)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"delayserver {delayserver.__version__}")
        raise typer.Exit


@with_options
def _root(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Show the version.",
            callback=_print_version,
            is_eager=True,
            metavar="",
        ),
    ] = False,
    connection: ConnectionOptions,
) -> None:
    """Options of the server may stand here, too: see `server_command`."""


def modules_of(arguments: Sequence[str]) -> tuple[str, ...]:
    """The modules that a command line needs: imports are most of the cost of a command."""
    if arguments == ["--version"]:
        return ()
    wanted = next((word for word in arguments if not word.startswith("-")), None)
    found = tuple(module for module, commands in COMMANDS.items() if wanted in commands)
    return found or tuple(COMMANDS)


def main() -> None:
    """The entry point of the command `delayserver`."""
    modules = modules_of(sys.argv[1:])
    if modules == ("serve",):
        # The objects of a start live until the end. `delayserver.serve.process` and the
        # supervisor turn the collector on again.
        gc.disable()
    make_app(modules)(prog_name="delayserver")
