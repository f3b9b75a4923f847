"""pull, ack, nack, extend: consuming by hand.

Cost: one request each; pull with --ack makes two. Threads: one.
"""

import sys
from typing import Annotated, Any

import typer

from delayserver.cli.options import NameArgument, duration, number_or_text, option
from delayserver.cli.output import blocks
from delayserver.cli.session import TIMEOUT_S, CommandError, Session, path, server_command
from delayserver.errors import InputError
from delayserver.times import parse_duration_ms

LeasesArgument = Annotated[
    list[str], typer.Argument(metavar="LEASE...", help="As `pull --no-ack` printed it.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    server_command(app, "pull", "pull refunds --max 10 --wait 20s", "pull refunds --no-ack")(pull)
    server_command(app, "ack", "ack refunds LEASE")(ack)
    server_command(app, "nack", "nack refunds LEASE --delay 5m")(nack)
    server_command(app, "extend", "extend refunds LEASE --lease 2m")(extend)


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
        option(
            "--lease", "Keep them from others this long (default: the subscription's).", "DURATION"
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
    request: dict[str, Any] = {"max": count_max, "wait": wait_ms}
    if lease is not None:
        request["lease"] = duration(lease, "--lease")
    answer = session.call(
        "POST", path("subscriptions", name, "pull"), request, timeout_s=wait_ms / 1000 + TIMEOUT_S
    )
    messages = answer["messages"]
    session.show(answer, lambda: blocks(messages, empty="No message is due."))
    if messages and acknowledge:
        # A message that was printed into a closed pipe has reached no program.
        sys.stdout.flush()
        leases = [message["lease"] for message in messages]
        _end(session, name, "ack", leases)


def ack(session: Session, *, name: NameArgument, leases: LeasesArgument) -> None:
    """Acknowledge messages that were pulled with --no-ack: they never come again.

    Status 1: a lease had expired, and its message may come again."""
    answer = _end(session, name, "ack", leases)
    session.show(answer, lambda: f"{answer['acked']} acknowledged")


def nack(
    session: Session,
    *,
    name: NameArgument,
    leases: LeasesArgument,
    delay: Annotated[
        str, typer.Option(metavar="DURATION", help="Not before this time is over.")
    ] = "0",
) -> None:
    """Give messages back that were pulled with --no-ack: they come again, now or later.

    Status 1: a lease had expired, and its message may come at once."""
    answer = _end(session, name, "nack", leases, delay=duration(delay, "--delay"))
    session.show(answer, lambda: f"{answer['nacked']} given back")


def extend(
    session: Session,
    *,
    name: NameArgument,
    leases: LeasesArgument,
    lease: Annotated[str, typer.Option(metavar="DURATION", help="How much longer, from now.")],
) -> None:
    """Keep messages for longer that were pulled with --no-ack.

    Status 1: a lease had expired, and its message may come again."""
    answer = _end(session, name, "extend", leases, lease=duration(lease, "--lease"))
    session.show(answer, lambda: f"{answer['extended']} extended")


_DONE = {"ack": "acked", "nack": "nacked", "extend": "extended"}


def _end(session: Session, name: str, call: str, leases: list[str], **fields: Any) -> Any:
    document = {"leases": leases, **fields}
    answer = session.call("POST", path("subscriptions", name, call), document)
    if answer["expired"]:
        raise Expired(answer, answer[_DONE[call]])
    return answer


class Expired(CommandError):
    """Some leases ended before."""

    def __init__(self, answer: dict[str, Any], done: int) -> None:
        expired = answer["expired"]
        super().__init__(
            f"{len(expired)} of {done + len(expired)} leases had expired; their "
            "messages come again. Be sooner, or pull with a longer --lease:\n  "
            + "\n  ".join(expired)
        )
        self.document = answer
