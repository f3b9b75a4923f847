"""How values are written on the command line, and the fields of a request that they become.

Only the command line's own forms are checked here; the rest is the server's to judge.

Cost: none. Threads: pure, but for a body that is read from a file.
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from delayserver.cli.command_options import CommandOptions
from delayserver.cli.session import path
from delayserver.errors import InputError
from delayserver.times import parse_duration_ms, parse_time_ms
from delayserver.wire.fields import Mechanism
from delayserver.wire.messages import PRIORITY_MAX


def option(flag: str, help: str, metavar: str | None = None, **more: Any) -> Any:
    """An option that may be left out, for which nothing stands then."""
    return typer.Option(flag, help=help, metavar=metavar, show_default=False, **more)


IdArgument = Annotated[str | None, typer.Argument(metavar="[ID]", help="Id of the message.")]
MessageIdArgument = Annotated[str, typer.Argument(metavar="ID", help="Id of the message.")]
SubjectOption = Annotated[str | None, option("--subject", "Subject of the key.", "SUBJECT")]
KeyOption = Annotated[str | None, option("--key", "Key instead of an id.", "KEY")]
NameArgument = Annotated[
    str, typer.Argument(metavar="SUBSCRIPTION", help="Name of the subscription.")
]
BodyArgument = Annotated[
    str,
    typer.Argument(metavar="BODY", help="JSON text; - reads standard input, @FILE reads a file."),
]
HeaderOption = Annotated[
    list[str] | None, option("--header", "Sent along; may be repeated.", "NAME=VALUE")
]
LinesArgument = Annotated[
    Path | None, typer.Argument(metavar="[FILE]", help="One to a line; standard input without it.")
]
DelayOption = Annotated[
    str | None, option("--delay", "Due this long from now: 500ms, 30m, 1h30m, 2d.", "DURATION")
]
AtOption = Annotated[
    str | None,
    option(
        "--at",
        "Due at this time: 2026-11-20T17:30:00+01:00, or milliseconds since the epoch.",
        "TIME",
    ),
]
KafkaUserOption = Annotated[
    str | None,
    option(
        "--kafka-user", "Kafka: whom the brokers let in (SASL); with --broker-password.", "NAME"
    ),
]
KafkaMechanismOption = Annotated[
    Mechanism | None,
    option("--kafka-mechanism", "Kafka: how that user logs in; PLAIN if nothing is said."),
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


@dataclass(frozen=True, kw_only=True)
class FurtherOptions(CommandOptions):
    """Further options of a message."""

    ttl: Annotated[
        str | None,
        option(
            "--ttl",
            "A dead letter if it cannot be delivered within this time after it is due.",
            "DURATION",
        ),
    ] = None
    jitter: Annotated[
        str | None, option("--jitter", "Due up to so much later, drawn by the server.", "DURATION")
    ] = None
    priority: Annotated[
        int | None,
        option(
            "--priority",
            "Of what is due, higher ones are delivered first.",
            min=0,
            max=PRIORITY_MAX,
        ),
    ] = None
    to: Annotated[
        str | None,
        option("--to", "Where it goes by webhook, instead of to subscriptions; see --to-….", "URL"),
    ] = None
    to_secret: Annotated[
        str | None,
        option(
            "--to-secret",
            "With --to: sign with this secret (Standard Webhooks).",
            "whsec_…",
            envvar="DELAYSERVER_TO_SECRET",
        ),
    ] = None
    to_timeout: Annotated[
        str | None, option("--to-timeout", "With --to: time for an answer.", "DURATION")
    ] = None
    to_max_attempts: Annotated[
        int | None, option("--to-max-attempts", "With --to: attempts before it is a dead letter.")
    ] = None
    to_backoff: Annotated[
        list[str] | None,
        option(
            "--to-backoff",
            "With --to: wait before the next attempt; give it once for each.",
            "DURATION",
        ),
    ] = None
    on_delivered: Annotated[
        str | None,
        option(
            "--on-delivered",
            "Publish a message there when it was delivered; one for each subscription.",
            "SUBJECT",
        ),
    ] = None
    on_dead: Annotated[
        str | None,
        option(
            "--on-dead",
            "Publish a message there when it is a dead letter; one for each subscription.",
            "SUBJECT",
        ),
    ] = None
    group: Annotated[
        str | None,
        option(
            "--group",
            "Of a group, each subscription has one delivery under way, in due order.",
            "NAME",
        ),
    ] = None

    def fields(self) -> dict[str, Any]:
        """As they stand in a request."""
        waits = [duration(wait, "--to-backoff") for wait in self.to_backoff or ()] or None
        retry = given({"max_attempts": self.to_max_attempts, "backoff": waits}) or None
        to = given({"timeout": duration(self.to_timeout, "--to-timeout"), "retry": retry})
        if self.to is not None:
            # A secret may stand in the environment for messages that have a URL.
            to |= given({"url": self.to, "secret": self.to_secret})
        elif to:
            raise typer.BadParameter("the others need --to", param_hint="--to")
        on_delivered, on_dead = (
            None if subject is None else {"subject": subject}
            for subject in (self.on_delivered, self.on_dead)
        )
        return given(
            {
                "ttl": duration(self.ttl, "--ttl"),
                "jitter": duration(self.jitter, "--jitter"),
                "priority": self.priority,
                "on_delivered": on_delivered,
                "on_dead": on_dead,
                "group": self.group,
                "to": to or None,
            }
        )


def given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a document that are there: None stands for one that is not."""
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
