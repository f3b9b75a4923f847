"""sources: list, put, show, pause, resume, delete.

Cost: one request; of a list one for each 100. Threads: one.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer

from delayserver.cli import named
from delayserver.cli.command_options import CommandOptions, with_options
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


@dataclass(frozen=True, kw_only=True)
class LoginOptions(CommandOptions):
    """How the brokers let the source in."""

    kafka_user: KafkaUserOption = None
    password: Annotated[
        str | None,
        option(
            "--broker-password",
            "The password of --kafka-user.",
            envvar="DELAYSERVER_BROKER_PASSWORD",
        ),
    ] = None
    kafka_mechanism: KafkaMechanismOption = None
    kafka_tls: KafkaTlsOption = False

    def fields(self) -> dict[str, Any]:
        """As they stand in a request."""
        return {
            "username": self.kafka_user,
            # The variable may be there for the brokers of others.
            "password": None if self.kafka_user is None else self.password,
            "mechanism": self.kafka_mechanism,
            "tls": self.kafka_tls or None,
        }


@with_options
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
    login: LoginOptions,
) -> None:
    """Make a source, or change it; an option that is not given has its default then."""
    document = {
        "type": "kafka",
        "subject": subject,
        "bootstrap": bootstrap,
        "topic": topic,
        "due_header": due_header,
        "group": group,
        "on_error": on_error,
        **login.fields(),
    }
    session.show(session.call("PUT", path("sources", name), given(document)))
