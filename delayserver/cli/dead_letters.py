"""dead-letters: messages that no attempt delivered.

Cost: one request; list: one for each 1,000. Threads: one.
"""

from typing import Annotated

import typer

from delayserver.cli.options import NameArgument
from delayserver.cli.output import help_text, rows
from delayserver.cli.session import NAMED_PAGE_MAX, Session, path, server_command

COLUMNS = ("id", "subject", "key", "attempts", "died_at", "reason")


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    group = typer.Typer(
        no_args_is_help=True,
        help=help_text("List, deliver again or delete the messages that no attempt delivered."),
    )
    app.add_typer(group, name="dead-letters")
    server_command(group, "list", "dead-letters list shop --limit 1000")(list_letters)
    server_command(group, "count", "dead-letters count")(count)
    server_command(
        group,
        "redrive",
        "dead-letters redrive shop --all",
        "dead-letters redrive shop 00000193d2a8b5c0000000000001aa55c3d2",
    )(redrive)
    server_command(
        group, "delete", "dead-letters delete shop 00000193d2a8b5c0000000000001aa55c3d2"
    )(delete)


def list_letters(
    session: Session,
    *,
    name: NameArgument,
    limit: Annotated[int, typer.Option(min=1, help="Most to list.")] = 100,
) -> None:
    """List the dead letters of a subscription, as their last attempts were scheduled.

    Also of one that was deleted. With --json their bodies and headers too."""
    answer = session.pages(path("subscriptions", name, "dead-letters"), "dead_letters", limit)
    letters = answer["dead_letters"]
    session.show(answer, lambda: rows(letters, COLUMNS, empty=f"{name} has no dead letters."))


def count(
    session: Session,
    *,
    limit: Annotated[int, typer.Option(min=1, help="Most subscriptions to list.")] = 100,
) -> None:
    """Show who has dead letters, and how many: counted up to 1,000 in each shard."""
    answer = session.pages(path("dead-letters"), "subscriptions", limit, page_max=NAMED_PAGE_MAX)
    found = answer["subscriptions"]
    session.show(
        answer, lambda: rows(found, ("name", "count"), empty="No subscription has dead letters.")
    )


def redrive(
    session: Session,
    *,
    name: NameArgument,
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]...", help="Ids of the messages.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
) -> None:
    """Deliver dead letters again, with all attempts anew."""
    if bool(ids) == everything:
        raise typer.BadParameter("give ids, or --all")
    document = {"ids": ids} if ids else {}
    session.show(
        session.call("POST", path("subscriptions", name, "dead-letters", "redrive"), document)
    )


def delete(
    session: Session,
    *,
    name: NameArgument,
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Ids of the messages.")],
) -> None:
    """Delete dead letters: they are never delivered.

    Those before one that is not there are deleted."""
    for message_id in ids:
        session.call("DELETE", path("subscriptions", name, "dead-letters", message_id))
    answer = {"deleted": len(ids)}
    session.show(answer)
