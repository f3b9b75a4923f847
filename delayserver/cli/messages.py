"""publish, replace, get, cancel, move: one message each; list: those that wait.

Cost: one request; list: one for each 1,000. Threads: one.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from delayserver.cli.command_options import CommandOptions, with_options
from delayserver.cli.options import (
    AtOption,
    BodyArgument,
    DelayOption,
    FurtherOptions,
    HeaderOption,
    IdArgument,
    KeyOption,
    SubjectOption,
    due_fields,
    duration,
    given,
    header_fields,
    message_path,
    option,
    with_body,
)
from delayserver.cli.output import rows
from delayserver.cli.session import Session, path, server_command


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    server_command(
        app,
        "publish",
        """publish order.unpaid '{"order": 1001}' --delay 30m --key 1001""",
        """publish code.sent '{"user": 7}' --ttl 2m --priority 9""",
        "publish report.done @report.json --to https://hooks.example.com/done",
        """publish report.due '{"month": 11}' --delay 1h --on-dead report.failed""",
        """publish account.changed '{"user": 7}' --group user:7""",
        "publish report.daily @report.json --at 2026-11-21T06:00:00+01:00",
    )(publish)
    server_command(
        app,
        "replace",
        """replace session.expired user-7 '{"user": 7}' --delay 30m""",
        """replace search.reindex shop-7 '{"shop": 7}' --debounce 5s --at-most 1m""",
    )(replace)
    server_command(
        app,
        "get",
        "get 00000193d2a8b5c0000000000001aa55c3d2",
        "get --subject order.unpaid --key 1001",
    )(get)
    server_command(app, "cancel", "cancel --subject order.unpaid --key 1001")(cancel)
    server_command(app, "move", "move --subject order.unpaid --key 1001 --delay 15m")(move)
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
    since: Annotated[str | None, option("--from", "Due at this time or later.", "TIME")] = None,
    until: Annotated[str | None, option("--to", "Due before this time.", "TIME")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most messages to list.")] = 100,
) -> None:
    """List the messages that wait, in due order, also those that nobody has subscribed to."""
    where = path("subjects", subject, "messages")
    answer = session.pages(where, "messages", limit, {"from": since, "to": until})
    columns = ("id", "key", "deliver_at", "state", "attempts", "body")
    session.show(
        answer, lambda: rows(answer["messages"], columns, empty=f"Nothing of {subject} is pending.")
    )


@with_options
def publish(
    session: Session,
    *,
    subject: Annotated[str, typer.Argument(metavar="SUBJECT", help="The subject of the message.")],
    body: BodyArgument,
    delay: DelayOption = None,
    at: AtOption = None,
    key: Annotated[
        str | None,
        option("--key", "Your own name for it: publishing the same again changes nothing.", "KEY"),
    ] = None,
    headers: HeaderOption = None,
    watch: Annotated[
        list[str] | None,
        option("--watch", "An event for it completes the message; up to 8.", "KEY"),
    ] = None,
    on_event: Annotated[
        str | None,
        option(
            "--on-event",
            "The effect of an event: cancel it (the default), or deliver it now.",
            "cancel|fire",
        ),
    ] = None,
    options: FurtherOptions,
) -> None:
    """Publish a message: now, after a delay, or at a time.

    When this command ends with status 0, the message is stored durably."""
    document: dict[str, Any] = {"subject": subject, **due_fields(delay, at), **options.fields()}
    if key is not None:
        document["key"] = key
    if headers:
        document["headers"] = header_fields(headers)
    if watch:
        document["watch"] = watch
    if on_event is not None:
        document["on_event"] = on_event
    session.show(session.call("POST", path("messages"), content=with_body(document, body)))


@dataclass(frozen=True, kw_only=True)
class DebounceOptions(CommandOptions):
    """The debounce of a message that is put."""

    debounce: Annotated[
        str | None,
        option("--debounce", "It is due when no call has come for so long.", "DURATION"),
    ] = None
    at_most: Annotated[
        str | None,
        option("--at-most", "… and so long after the first call at the latest.", "DURATION"),
    ] = None
    keep: Annotated[
        str | None,
        option("--keep", "Whose body is delivered: the last call's (the default).", "last|first"),
    ] = None

    def fields(self) -> dict[str, Any]:
        """As they stand in a request."""
        if self.debounce is None:
            if self.at_most is not None or self.keep is not None:
                raise typer.BadParameter("goes with --debounce", param_hint="--at-most, --keep")
            return {}
        quiet, at_most = duration(self.debounce, "--debounce"), duration(self.at_most, "--at-most")
        return {"debounce": given({"quiet": quiet, "at_most": at_most, "keep": self.keep})}


@with_options
def replace(
    session: Session,
    *,
    subject: Annotated[str, typer.Argument(metavar="SUBJECT", help="The subject of the message.")],
    key: Annotated[str, typer.Argument(metavar="KEY", help="The key whose message it replaces.")],
    body: BodyArgument,
    delay: DelayOption = None,
    at: AtOption = None,
    headers: HeaderOption = None,
    debounce: DebounceOptions,
    options: FurtherOptions,
) -> None:
    """Publish a message in place of the one that waits under its key, if one does.

    A timer that each call pushes back: it fires when no call has come for the delay. With
    --debounce it fires at the latest --at-most after the first call, however many come."""
    document = due_fields(delay, at) | debounce.fields() | options.fields()
    if headers:
        document["headers"] = header_fields(headers)
    content = with_body(document, body)
    session.show(session.call("PUT", path("subjects", subject, "keys", key), content=content))


def get(
    session: Session,
    *,
    message_id: IdArgument = None,
    subject: SubjectOption = None,
    key: KeyOption = None,
) -> None:
    """Look a message up: its state, when it is due, and its result at each subscription."""
    session.show(session.call("GET", message_path(message_id, subject, key)))


def cancel(
    session: Session,
    *,
    message_id: IdArgument = None,
    subject: SubjectOption = None,
    key: KeyOption = None,
) -> None:
    """Cancel a message. Once this ends with status 0 it never fires.

    Status 1: it is being delivered, or was."""
    session.show(session.call("DELETE", message_path(message_id, subject, key)))


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
    session.show(session.call("PATCH", message_path(message_id, subject, key), due))
