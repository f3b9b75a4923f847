"""How values are written on the command line, and what becomes of them in a request.

Only what the command line itself makes is checked here; the rest is the server's to judge.

Cost: none. Threads: pure, but for a body that is read from a file.
"""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from delayserver.cli.session import path
from delayserver.errors import InputError
from delayserver.times import parse_duration_ms, parse_time_ms

IdArgument = Annotated[str | None, typer.Argument(metavar="[ID]", help="Id of the message.")]
MessageIdArgument = Annotated[str, typer.Argument(metavar="ID", help="Id of the message.")]
SubjectOption = Annotated[
    str | None, typer.Option("--subject", metavar="SUBJECT", help="Subject of the key.")
]
KeyOption = Annotated[
    str | None, typer.Option("--key", metavar="KEY", help="Key instead of an id.")
]
NameArgument = Annotated[
    str, typer.Argument(metavar="SUBSCRIPTION", help="Name of the subscription.")
]
BodyArgument = Annotated[
    str,
    typer.Argument(metavar="BODY", help="JSON text; - reads standard input, @FILE reads a file."),
]
HeaderOption = Annotated[
    list[str] | None,
    typer.Option("--header", metavar="NAME=VALUE", help="Sent along; may be repeated."),
]
LinesArgument = Annotated[
    Path | None, typer.Argument(metavar="[FILE]", help="One to a line; standard input without it.")
]
DelayOption = Annotated[
    str | None,
    typer.Option(
        "--delay", metavar="DURATION", help="Due this long from now: 500ms, 30m, 1h30m, 2d."
    ),
]
AtOption = Annotated[
    str | None,
    typer.Option(
        "--at",
        metavar="TIME",
        help="Due at this time: 2026-11-20T17:30:00+01:00, or milliseconds since the epoch.",
    ),
]

TtlOption = Annotated[
    str | None,
    typer.Option(
        "--ttl",
        metavar="DURATION",
        help="A dead letter if it cannot be delivered within this time after it is due.",
    ),
]
JitterOption = Annotated[
    str | None,
    typer.Option(
        "--jitter", metavar="DURATION", help="Due up to so much later, drawn by the server."
    ),
]
PriorityOption = Annotated[
    int | None,
    typer.Option(
        "--priority", min=0, max=9, help="Due messages with a higher priority are delivered first."
    ),
]

GroupOption = Annotated[
    str | None,
    typer.Option(
        "--group",
        metavar="NAME",
        help="Of a group, each subscription has one delivery under way, in due order.",
    ),
]


ToOption = Annotated[
    str | None,
    typer.Option(
        "--to",
        metavar="URL",
        help="Where it goes by webhook, instead of to subscriptions; see --to-….",
    ),
]
ToSecretOption = Annotated[
    str | None,
    typer.Option(
        "--to-secret",
        metavar="whsec_…",
        envvar="DELAYSERVER_TO_SECRET",
        help="With --to: sign with this secret (Standard Webhooks).",
        show_default=False,
    ),
]
ToTimeoutOption = Annotated[
    str | None,
    typer.Option("--to-timeout", metavar="DURATION", help="With --to: time for an answer."),
]
ToAttemptsOption = Annotated[
    int | None,
    typer.Option("--to-max-attempts", help="With --to: attempts before it is a dead letter."),
]
ToBackoffOption = Annotated[
    list[str] | None,
    typer.Option(
        "--to-backoff",
        metavar="DURATION",
        help="With --to: wait before the next attempt; give it once for each.",
    ),
]


OnDeliveredOption = Annotated[
    str | None,
    typer.Option(
        "--on-delivered",
        metavar="SUBJECT",
        help="Publish a message there when it was delivered; one for each subscription.",
    ),
]
OnDeadOption = Annotated[
    str | None,
    typer.Option(
        "--on-dead",
        metavar="SUBJECT",
        help="Publish a message there when it is a dead letter; one for each subscription.",
    ),
]
KafkaUserOption = Annotated[
    str | None,
    typer.Option(
        "--kafka-user",
        metavar="NAME",
        help="Kafka: whom the brokers let in (SASL); with --broker-password.",
        show_default=False,
    ),
]
KafkaMechanismOption = Annotated[
    Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] | None,
    typer.Option(
        "--kafka-mechanism",
        help="Kafka: how that user logs in; PLAIN if nothing is said.",
        show_default=False,
    ),
]
KafkaTlsOption = Annotated[
    bool, typer.Option("--kafka-tls", help="Kafka: encrypted, to brokers that the system trusts.")
]


def message_path(message_id: str | None, subject: str | None, key: str | None) -> str:
    """Where a message is looked up: by its id, or by subject and key."""
    if message_id is not None and subject is None and key is None:
        return path("messages", message_id)
    if message_id is None and subject is not None and key is not None:
        return path("subjects", subject, "keys", key)
    raise typer.BadParameter("give either ID, or both --subject and --key")


def due_fields(delay: str | None, at: str | None) -> dict[str, Any]:
    """`delay` or `deliver_at` of a request."""
    if delay is not None and at is not None:
        raise typer.BadParameter("give either --delay or --at, not both")
    return given({"delay": duration(delay, "--delay"), "deliver_at": moment(at, "--at")})


def to_fields(
    url: str | None,
    secret: str | None,
    timeout: str | None,
    max_attempts: int | None,
    backoff: list[str] | None,
) -> dict[str, Any]:
    """Where one message goes, as it stands in a request."""
    if url is None:
        # A secret may stand in the environment for messages that have a URL.
        if timeout is not None or max_attempts is not None or backoff:
            raise typer.BadParameter("the others need --to", param_hint="--to")
        return {}
    waits = [duration(wait, "--to-backoff") for wait in backoff] if backoff else None
    fields = {
        "url": url,
        "secret": secret,
        "timeout": duration(timeout, "--to-timeout"),
        "retry": given({"max_attempts": max_attempts, "backoff": waits}) or None,
    }
    return {"to": given(fields)}


def option_fields(
    ttl: str | None,
    jitter: str | None,
    priority: int | None,
    on_delivered: str | None,
    on_dead: str | None,
    group: str | None,
) -> dict[str, Any]:
    """What else is wanted of a message, as it stands in a request."""
    return given(
        {
            "ttl": duration(ttl, "--ttl"),
            "jitter": duration(jitter, "--jitter"),
            "priority": priority,
            "on_delivered": None if on_delivered is None else {"subject": on_delivered},
            "on_dead": None if on_dead is None else {"subject": on_dead},
            "group": group,
        }
    )


def given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What is there of a document, where None stands for what is not."""
    return {name: value for name, value in fields.items() if value is not None}


def duration(value: str | None, option: str) -> int | str | None:
    """A duration as it goes to the server, where there is one."""
    return _read(value, option, parse_duration_ms)


def moment(value: str | None, option: str) -> int | str | None:
    """A time as it goes to the server, where there is one."""
    return _read(value, option, parse_time_ms)


def _read(value: str | None, option: str, parse: Callable[[int | str], int]) -> int | str | None:
    if value is None:
        return None
    read = number_or_text(value)
    try:
        parse(read)
    except InputError as error:
        raise typer.BadParameter(error.detail, param_hint=option) from error
    return read


def number_or_text(value: str) -> int | str:
    """Milliseconds where only digits were written, else the text as it is."""
    return int(value) if value.isdecimal() and value.isascii() else value


def header_fields(headers: list[str] | None) -> dict[str, str]:
    """`["x-shop=7"]` as `{"x-shop": "7"}`."""
    fields: dict[str, str] = {}
    for header in headers or ():
        name, equals, value = header.partition("=")
        if not equals:
            raise typer.BadParameter(f"{header!r} has no '='", param_hint="--header")
        if name in fields:
            raise typer.BadParameter(f"{name!r} is there twice", param_hint="--header")
        fields[name] = value
    return fields


def read_body(body: str) -> str:
    """BODY as JSON text: as it is, from standard input (`-`), or from a file (`@FILE`)."""
    try:
        if body == "-":
            text = sys.stdin.read()
        elif body.startswith("@"):
            text = Path(body[1:]).read_text()
        else:
            text = body
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"cannot read the body: {error}", param_hint="BODY") from error
    try:
        json.loads(text, parse_constant=_no_constant)
    except ValueError as error:
        raise typer.BadParameter(
            f"not JSON: {error}. A text stands in double quotes, for a shell: '\"hello\"'",
            param_hint="BODY",
        ) from error
    return text


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")


def with_body(document: dict[str, Any], body: str) -> str:
    """The body goes out as it was written: numbers keep their digits."""
    fields = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in document.items()]
    return "{" + ", ".join([*fields, f'"body": {read_body(body)}']) + "}"
