"""heartbeat put, get, delete; event: timers that wait for a sign of life, or for something else.

Cost: one request. Threads: one.
"""

from typing import Annotated, Any

import typer

from delayserver.cli.options import BodyArgument, HeaderOption, header_fields, with_body
from delayserver.cli.output import help_text
from delayserver.cli.session import Session, path, server_command

HELP = """Publish a message unless a heartbeat is renewed in time: a dead man's switch."""

HeartbeatArgument = Annotated[str, typer.Argument(metavar="KEY", help="Name of the heartbeat.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
    server_command(
        group, "put", """heartbeat put worker-7 worker.lost '{"worker": 7}' --timeout 10s"""
    )(put)
    server_command(group, "get", "heartbeat get worker-7")(get)
    server_command(group, "delete", "heartbeat delete worker-7")(delete)
    app.add_typer(group, name="heartbeat", help=help_text(HELP))
    server_command(app, "event", "event order:1001")(event)


def put(
    session: Session,
    *,
    key: HeartbeatArgument,
    subject: Annotated[
        str, typer.Argument(metavar="SUBJECT", help="The subject that it publishes to.")
    ],
    body: BodyArgument,
    timeout: Annotated[str, typer.Option(metavar="DURATION", help="Renew it within: 10s, 5m, 1h.")],
    headers: HeaderOption = None,
) -> None:
    """Make a heartbeat, or renew it: its message is published unless this is done again in time."""
    document: dict[str, Any] = {"timeout": timeout, "subject": subject}
    if headers:
        document["headers"] = header_fields(headers)
    session.show(session.call("PUT", path("heartbeats", key), content=with_body(document, body)))


def get(session: Session, *, key: HeartbeatArgument) -> None:
    """Show a heartbeat, and when it expires."""
    session.show(session.call("GET", path("heartbeats", key)))


def delete(session: Session, *, key: HeartbeatArgument) -> None:
    """End a heartbeat: its message will never be published."""
    session.call("DELETE", path("heartbeats", key))
    session.show({"key": key, "deleted": True}, lambda: f"The heartbeat {key} has ended.")


def event(
    session: Session,
    *,
    key: Annotated[str, typer.Argument(metavar="KEY", help="The watch key.")],
) -> None:
    """Complete all messages that watch a key: cancel them, or deliver them now, as each says."""
    answer = session.call("POST", path("events", key))
    session.show(
        answer, lambda: f"{answer['cancelled']:,} cancelled, {answer['fired']:,} delivered now."
    )
