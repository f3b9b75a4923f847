"""subscribe, subscriptions, pull, ack: the receiving side.

Cost: one request each; pull with --ack makes two. Threads: one.
"""

import sys
from typing import Annotated, Any

import typer

from delayserver.cli.options import number_or_text
from delayserver.cli.output import blocks, details, rows
from delayserver.cli.session import TIMEOUT_S, CommandError, Session, path, server_command
from delayserver.errors import InputError
from delayserver.times import parse_duration_ms

NameArgument = Annotated[
    str, typer.Argument(metavar="SUBSCRIPTION", help="Name of the subscription.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    server_command(
        app,
        "subscribe",
        "subscribe shop order.unpaid --webhook http://127.0.0.1:9000/unpaid",
        "subscribe refunds 'envelope.*' --lease 30s",
    )(subscribe)
    server_command(app, "subscriptions", "subscriptions --json")(subscriptions)
    server_command(app, "pull", "pull refunds --max 10 --wait 20s", "pull refunds --no-ack")(pull)
    server_command(app, "ack", "ack refunds LEASE")(ack)


def subscribe(
    session: Session,
    *,
    name: NameArgument,
    subject: Annotated[
        str,
        typer.Argument(
            metavar="SUBJECT", help="A subject, a prefix that ends in .* (any depth), or *."
        ),
    ],
    webhook: Annotated[
        str | None,
        typer.Option(
            "--webhook",
            metavar="URL",
            help="POST each message to this address. Without it, messages wait to be pulled.",
            show_default=False,
        ),
    ] = None,
    secret: Annotated[
        str | None,
        typer.Option(
            "--secret",
            metavar="whsec_…",
            envvar="DELAYSERVER_WEBHOOK_SECRET",
            help="Webhook: sign with this secret (Standard Webhooks).",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[
        str | None,
        typer.Option(
            "--timeout",
            metavar="DURATION",
            help="Webhook: the receiver answers within this time.",
            show_default=False,
        ),
    ] = None,
    max_in_flight: Annotated[
        int | None,
        typer.Option(help="Webhook: most requests at once.", show_default=False),
    ] = None,
    max_attempts: Annotated[
        int | None,
        typer.Option(help="Webhook: attempts before it is a dead letter.", show_default=False),
    ] = None,
    backoff: Annotated[
        list[str] | None,
        typer.Option(
            "--backoff",
            metavar="DURATION",
            help="Webhook: wait before the next attempt; repeat for the ones after it.",
        ),
    ] = None,
    lease: Annotated[
        str | None,
        typer.Option(
            "--lease",
            metavar="DURATION",
            help="Pull: a message that was not acknowledged by then comes again.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Make a subscription, or change it.

    It receives the messages of its subject that fall due from now on."""
    retry: dict[str, Any] = {
        "max_attempts": max_attempts,
        "backoff": [number_or_text(delay) for delay in backoff] if backoff else None,
    }
    document: dict[str, Any] = {
        "subject": subject,
        "type": "pull" if webhook is None else "webhook",
        "url": webhook,
        "secret": secret,
        "timeout": None if timeout is None else number_or_text(timeout),
        "max_in_flight": max_in_flight,
        "retry": _given(retry) or None,
        "lease": None if lease is None else number_or_text(lease),
    }
    answer = session.call("PUT", path("subscriptions", name), _given(document))
    session.show(answer, lambda: details(answer))


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def subscriptions(session: Session) -> None:
    """List all subscriptions."""
    answer = session.call("GET", path("subscriptions"))
    session.show(
        answer,
        lambda: rows(
            _listed(answer, "subscriptions"),
            ("name", "subject", "type", "url", "lease", "paused"),
            empty="There are no subscriptions; make one with `delayserver subscribe`.",
        ),
    )


def _listed(answer: Any, name: str) -> list[dict[str, Any]]:
    found = answer.get(name, []) if isinstance(answer, dict) else answer
    return list(found)


def pull(
    session: Session,
    *,
    name: NameArgument,
    count_max: Annotated[int, typer.Option("--max", min=1, help="Most messages at once.")] = 100,
    wait: Annotated[
        str, typer.Option(metavar="DURATION", help="Wait this long for the first one.")
    ] = "20s",
    lease: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="Keep them from others this long (default: the subscription's).",
            show_default=False,
        ),
    ] = None,
    acknowledge: Annotated[
        bool,
        typer.Option(
            "--ack/--no-ack",
            help="Acknowledge them after they were printed, or let them come again.",
        ),
    ] = True,
) -> None:
    """Take the messages that are due, print them, and acknowledge them.

    With --no-ack they come again after the lease, unless `ack` is called with it."""
    try:
        wait_ms = parse_duration_ms(number_or_text(wait))
    except InputError as error:
        raise typer.BadParameter(error.detail, param_hint="--wait") from error
    request = _given({"max": count_max, "wait": wait_ms, "lease": lease and number_or_text(lease)})
    answer = session.call(
        "POST",
        path("subscriptions", name, "pull"),
        request,
        timeout_s=wait_ms / 1000 + TIMEOUT_S,
    )
    messages = _listed(answer, "messages")
    session.show(answer, lambda: blocks(messages, empty="No message is due."))
    if messages and acknowledge:
        # What was printed into a closed pipe was not received by anybody.
        sys.stdout.flush()
        leases = [message["lease"] for message in messages]
        _acknowledge(session, name, leases)


def ack(
    session: Session,
    *,
    name: NameArgument,
    leases: Annotated[list[str], typer.Argument(metavar="LEASE...", help="As `pull` printed it.")],
) -> None:
    """Acknowledge messages that were pulled with --no-ack: they never come again.

    Status 1: a lease had expired, and its message may come again."""
    answer = _acknowledge(session, name, leases)
    session.show(answer, lambda: f"{answer['acked']} acknowledged")


def _acknowledge(session: Session, name: str, leases: list[str]) -> Any:
    answer = session.call("POST", path("subscriptions", name, "ack"), {"leases": leases})
    if answer["expired"]:
        raise Expired(answer)
    return answer


class Expired(CommandError):
    """Some leases ended before they were acknowledged."""

    def __init__(self, answer: dict[str, Any]) -> None:
        expired = answer["expired"]
        super().__init__(
            f"{len(expired)} of {answer['acked'] + len(expired)} leases had expired; their "
            "messages come again. Acknowledge sooner, or pull with a longer --lease:\n  "
            + "\n  ".join(expired)
        )
        self.document = answer
