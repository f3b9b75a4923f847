"""publish, get, cancel, move: one message each; list: those that wait.

Cost: one request; list: one for each 1,000. Threads: one.
"""

import json
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from delayserver.cli.options import (
    AtOption,
    DelayOption,
    IdArgument,
    KeyOption,
    SubjectOption,
    due_fields,
    header_fields,
    message_path,
    read_body,
)
from delayserver.cli.output import details, rows
from delayserver.cli.session import Session, path, server_command

PAGE_MAX = 1000


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    server_command(
        app,
        "publish",
        """publish order.unpaid '{"order": 1001}' --delay 30m --key 1001""",
        "publish report.daily @report.json --at 2026-11-21T06:00:00+01:00",
    )(publish)
    server_command(
        app,
        "get",
        "get 00000193d2a8b5c0000000000001aa55c3d2",
        "get --subject order.unpaid --key 1001",
    )(get)
    server_command(
        app,
        "cancel",
        "cancel --subject order.unpaid --key 1001",
    )(cancel)
    server_command(
        app,
        "move",
        "move --subject order.unpaid --key 1001 --delay 15m",
    )(move)
    server_command(
        app,
        "list",
        "list order.unpaid",
        "list order.unpaid --from 2026-11-21T06:00:00Z --to 2026-11-21T07:00:00Z --limit 10000",
    )(list_pending)


def list_pending(
    session: Session,
    *,
    subject: Annotated[str, typer.Argument(metavar="SUBJECT", help="Whose messages.")],
    since: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="TIME", help="Due at this time or later.", show_default=False
        ),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option("--to", metavar="TIME", help="Due before this time.", show_default=False),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most messages to list.")] = 100,
) -> None:
    """List the messages that wait, in due order, also those that nobody has subscribed to."""
    messages: list[Any] = []
    cursor = None
    while True:
        asked = {"from": since, "to": until, "limit": min(limit - len(messages), PAGE_MAX)}
        query = {name: value for name, value in {**asked, "cursor": cursor}.items() if value}
        answer = session.call("GET", f"{path('subjects', subject, 'messages')}?{urlencode(query)}")
        messages += answer["messages"]
        cursor = answer["cursor"]
        if cursor is None or len(messages) >= limit:
            break
    columns = ("id", "key", "deliver_at", "state", "attempts", "body")
    session.show(
        {"messages": messages, "cursor": cursor},
        lambda: rows(messages, columns, empty=f"Nothing of {subject} is pending."),
    )


def publish(
    session: Session,
    *,
    subject: Annotated[str, typer.Argument(metavar="SUBJECT", help="What it is about.")],
    body: Annotated[
        str,
        typer.Argument(
            metavar="BODY", help="JSON text; - reads standard input, @FILE reads a file."
        ),
    ],
    delay: DelayOption = None,
    at: AtOption = None,
    key: Annotated[
        str | None,
        typer.Option(
            "--key",
            metavar="KEY",
            help="Your own name for it: publishing the same again changes nothing.",
            show_default=False,
        ),
    ] = None,
    headers: Annotated[
        list[str] | None,
        typer.Option("--header", metavar="NAME=VALUE", help="Sent along; may be repeated."),
    ] = None,
) -> None:
    """Publish a message: now, after a delay, or at a time.

    When this command ends with status 0, the message is stored durably."""
    document: dict[str, Any] = {"subject": subject, **due_fields(delay, at)}
    if key is not None:
        document["key"] = key
    if headers:
        document["headers"] = header_fields(headers)
    # The body goes out as it was written: numbers keep their digits.
    content = f'{json.dumps(document)[:-1]}, "body": {read_body(body)}}}'
    answer = session.call("POST", path("messages"), content=content)
    session.show(answer, lambda: details(answer))


def get(
    session: Session,
    *,
    message_id: IdArgument = None,
    subject: SubjectOption = None,
    key: KeyOption = None,
) -> None:
    """Look a message up: its state, when it is due, what became of it."""
    answer = session.call("GET", message_path(message_id, subject, key))
    session.show(answer, lambda: details(answer))


def cancel(
    session: Session,
    *,
    message_id: IdArgument = None,
    subject: SubjectOption = None,
    key: KeyOption = None,
) -> None:
    """Cancel a message. Once this ends with status 0 it never fires.

    Status 1: it is being delivered, or was."""
    answer = session.call("DELETE", message_path(message_id, subject, key))
    session.show(answer, lambda: details(answer))


def move(
    session: Session,
    *,
    message_id: IdArgument = None,
    subject: SubjectOption = None,
    key: KeyOption = None,
    delay: DelayOption = None,
    at: AtOption = None,
) -> None:
    """Give a message another due time; its id stays."""
    due = due_fields(delay, at)
    if not due:
        raise typer.BadParameter("say when it is due: --delay or --at")
    answer = session.call("PATCH", message_path(message_id, subject, key), due)
    session.show(answer, lambda: details(answer))
