"""messages: attempts, replay.

Cost: one request. Threads: one.
"""

from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlencode

import typer

from delayserver.cli.options import MessageIdArgument, option
from delayserver.cli.output import rows
from delayserver.cli.session import Session, path, server_command

if TYPE_CHECKING:
    from rich.console import RenderableType


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    group = typer.Typer()
    app.add_typer(group, name="messages", help="Look at one message more closely.")
    server_command(group, "attempts", "messages attempts 00000193d2a8b5c0000000000001aa55c3d2")(
        attempts
    )
    server_command(
        group,
        "replay",
        "messages replay 00000193d2a8b5c0000000000001aa55c3d2",
        "messages replay 00000193d2a8b5c0000000000001aa55c3d2 --subscription shop",
    )(replay)


def replay(
    session: Session,
    *,
    message_id: MessageIdArgument,
    subscription: Annotated[
        str | None,
        option("--subscription", "To this subscription alone, not to all that had it.", "NAME"),
    ] = None,
) -> None:
    """Deliver a message that is settled again, with the same id.

    Status 1: it is not settled yet, was cancelled, or is a dead letter, which can be redriven."""
    where = path("messages", message_id, "replay")
    if subscription is not None:
        where += "?" + urlencode({"subscription": subscription})
    answer = session.call("POST", where)
    session.show(answer, lambda: f"{message_id} goes to {', '.join(answer['subscriptions'])} again")


def attempts(session: Session, *, message_id: MessageIdArgument) -> None:
    """List how each attempt to deliver a message went: when, how long, and the answer."""
    answer = session.call("GET", path("messages", message_id, "attempts"))
    columns = ("subscription", "attempt", "at", "duration", "outcome", "status", "error", "answer")

    def shown() -> "RenderableType":
        from rich.console import Group  # as for all tables: only where one is shown

        table = rows(answer["attempts"], columns, empty="No attempt was recorded yet.")
        dropped = answer["dropped"]
        return Group(table, f"{dropped} more failed, behind the first three.") if dropped else table

    session.show(answer, shown)
