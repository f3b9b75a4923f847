"""sources: list, put, show, pause, resume, delete.

Cost: one request; of a list one for each 100. Threads: one.
"""

from typing import Annotated, Any, Literal

import typer

from delayserver.cli import named
from delayserver.cli.options import (
    KafkaMechanismOption,
    KafkaTlsOption,
    KafkaUserOption,
    given,
    option,
)
from delayserver.cli.session import Session, path, server_command

HELP = """Publish the records of a topic of Kafka, each once."""

SourceArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the source.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    columns = ("name", "subject", "topic", "published", "skipped", "paused", "error")
    group = named.add_group(app, "sources", "orders", HELP, columns)
    server_command(
        group,
        "put",
        "sources put orders order.unpaid 127.0.0.1:9092 orders",
        "sources put bills bill.due kafka1:9092,kafka2:9092 bills --due-header due --on-error stop",
    )(put)
    named.register(
        group,
        "sources",
        "orders",
        SourceArgument,
        show="Show one source, its positions, and the last record that it could not publish.",
        pause="Take nothing until it is resumed.",
        resume="Go on where it is; one that an error has stopped tries that record again.",
        delete="End a source. Its messages stay.",
    )


def put(
    session: Session,
    *,
    name: SourceArgument,
    subject: Annotated[
        str, typer.Argument(metavar="SUBJECT", help="The subject that it publishes to.")
    ],
    bootstrap: Annotated[
        str, typer.Argument(metavar="BROKERS", help="HOST:PORT, with commas between several.")
    ],
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic that it reads.")],
    due_header: Annotated[
        str | None,
        option(
            "--due-header",
            "The header that says when a message is due: a time, milliseconds since 1970, or a "
            "duration; delay-until without it.",
            "HEADER",
        ),
    ] = None,
    group: Annotated[
        str | None,
        option("--group", "The consumer group whose offsets show how far it is.", "GROUP"),
    ] = None,
    on_error: Annotated[
        Literal["skip", "stop"] | None,
        option(
            "--on-error", "With a record that cannot be published; without it that is left out."
        ),
    ] = None,
    kafka_user: KafkaUserOption = None,
    password: Annotated[
        str | None,
        option(
            "--broker-password",
            "The password of --kafka-user.",
            envvar="DELAYSERVER_BROKER_PASSWORD",
        ),
    ] = None,
    kafka_mechanism: KafkaMechanismOption = None,
    kafka_tls: KafkaTlsOption = False,
) -> None:
    """Make a source, or change it; an option that is not given has its default then."""
    document: dict[str, Any] = {
        "type": "kafka",
        "subject": subject,
        "bootstrap": bootstrap,
        "topic": topic,
        "due_header": due_header,
        "group": group,
        "on_error": on_error,
        "username": kafka_user,
        # The variable may be there for the brokers of others.
        "password": None if kafka_user is None else password,
        "mechanism": kafka_mechanism,
        "tls": kafka_tls or None,
    }
    session.show(session.call("PUT", path("sources", name), given(document)))
