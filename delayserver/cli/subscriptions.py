"""subscribe, and subscriptions: the receivers of messages.

Cost: one request each. Threads: one.
"""

from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import typer

from delayserver.cli import named
from delayserver.cli.command_options import CommandOptions, with_options
from delayserver.cli.options import (
    KafkaMechanismOption,
    KafkaTlsOption,
    KafkaUserOption,
    NameArgument,
    duration,
    given,
    header_fields,
    option,
)
from delayserver.cli.output import rows
from delayserver.cli.session import Session, path, server_command

RECEIVERS = ("webhook", "kafka", "redis", "nats", "amqp")
AS_THEY_ARE = (
    *("stream", "max_length", "nats_subject", "exchange", "routing_key", "key", "method"),
    "max_in_flight",
)
"""Options whose values stand in the request as they were written."""

SubjectPatternArgument = Annotated[
    str,
    typer.Argument(
        metavar="SUBJECT", help="A subject, a prefix that ends in .* (any depth), or *."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    server_command(
        app,
        "subscribe",
        "subscribe shop order.unpaid --webhook http://127.0.0.1:9000/unpaid",
        "subscribe refunds 'envelope.*' --lease 30s",
        "subscribe due 'order.*' --kafka broker1:9092,broker2:9092/orders.due --key '{id}'",
        "subscribe due 'order.*' --redis redis://127.0.0.1:6379 --stream orders.due",
        "subscribe due 'order.*' --nats nats://127.0.0.1:4222 --nats-subject 'due.{subject}'",
        "subscribe due 'order.*' --amqp amqp://127.0.0.1:5672 --exchange due",
        "subscribe sms sms --webhook http://127.0.0.1:9000/sms --rate 100 --catch-up spread=10m",
        "subscribe crm 'order.*' --webhook http://127.0.0.1:9000/ --header authorization=…",
    )(subscribe)
    group = typer.Typer()
    app.add_typer(group, name="subscriptions")
    server_command(group, None, "subscriptions", "subscriptions pause shop")(subscriptions)
    server_command(group, "list", "subscriptions list --json")(subscriptions)
    named.register(
        group,
        "subscriptions",
        "shop",
        NameArgument,
        show="Show one subscription, and how much waits for it.",
        pause="Deliver nothing to a subscription until it is resumed; due messages wait.",
        resume="Deliver again to a subscription that was paused.",
        delete="""Delete a subscription.

        Messages that only it was to get wait for the next one that matches.""",
    )


@dataclass(frozen=True, kw_only=True)
class SubscribeOptions(CommandOptions):
    """Options of `subscribe`."""

    webhook: Annotated[
        str | None,
        option(
            "--webhook",
            "POST each message to this address. Without it or a broker, messages wait to be "
            "pulled.",
            "URL",
        ),
    ] = None
    secret: Annotated[
        str | None,
        option(
            "--secret",
            "Webhook: sign with this secret (Standard Webhooks).",
            "whsec_…",
            envvar="DELAYSERVER_WEBHOOK_SECRET",
        ),
    ] = None
    timeout: Annotated[
        str | None,
        option("--timeout", "Not pull: the receiver answers within this time.", "DURATION"),
    ] = None
    max_in_flight: Annotated[
        int | None,
        option("--max-in-flight", "Webhook: most requests at once; brokers: most messages."),
    ] = None
    max_attempts: Annotated[
        int | None, option("--max-attempts", "Not pull: attempts before it is a dead letter.")
    ] = None
    backoff: Annotated[
        list[str] | None,
        option(
            "--backoff",
            "Not pull: wait before the next attempt; repeat for the ones after it.",
            "DURATION",
        ),
    ] = None
    previous_secret: Annotated[
        list[str] | None,
        option(
            "--previous-secret",
            "Webhook: sign with this one as well, while receivers change over.",
            "whsec_…",
            envvar="DELAYSERVER_WEBHOOK_PREVIOUS_SECRET",
        ),
    ] = None
    rate: Annotated[float | None, option("--rate", "Not pull: most messages a second.")] = None
    burst: Annotated[
        int | None, option("--burst", "Not pull: most messages at once, with --rate.")
    ] = None
    batch: Annotated[
        int | None,
        option("--batch", "Webhook: up to so many messages in one request, as an array."),
    ] = None
    linger: Annotated[
        str | None,
        option(
            "--linger", "Webhook: how long a message waits for others, with --batch.", "DURATION"
        ),
    ] = None
    catch_up: Annotated[
        str | None,
        option(
            "--catch-up",
            "How messages that fell due during downtime or a pause are delivered: all at once, "
            "evenly over a while, or as dead letters beyond an age.",
            "all|spread=DURATION|drop_older_than=DURATION",
        ),
    ] = None
    lease: Annotated[
        str | None,
        option(
            "--lease", "Pull: a message that was not acknowledged by then comes again.", "DURATION"
        ),
    ] = None
    kafka: Annotated[
        str | None,
        option(
            "--kafka", "Write each message to this topic of Kafka.", "HOST:PORT[,HOST:PORT…]/TOPIC"
        ),
    ] = None
    key: Annotated[
        str | None,
        option(
            "--key",
            "Kafka: the key of each record; that of its message if nothing is said.",
            "{key}|{subject}|{id}|TEXT",
        ),
    ] = None
    exactly_once: Annotated[
        bool,
        typer.Option(
            "--exactly-once",
            help="Kafka: in transactions; only from a cluster into the brokers it has its logs on.",
        ),
    ] = False
    header: Annotated[
        list[str] | None,
        option(
            "--header",
            "Webhook: sent along with each request, and never shown again; may be repeated.",
            "NAME=VALUE",
        ),
    ] = None
    method: Annotated[
        str | None,
        option("--method", "Webhook: how requests are made; POST if nothing is said.", "POST|PUT"),
    ] = None
    disable_after: Annotated[
        str | None,
        option(
            "--disable-after",
            "Webhook: pause it after so long of nothing but failures.",
            "DURATION",
        ),
    ] = None
    kafka_user: KafkaUserOption = None
    kafka_mechanism: KafkaMechanismOption = None
    kafka_tls: KafkaTlsOption = False
    redis: Annotated[
        str | None,
        option(
            "--redis",
            "Add each message to a stream of Redis: redis://[USER@]HOST[:PORT]\\[/DATABASE], or "
            "rediss:// for TLS; with --stream.",
            "URL",
        ),
    ] = None
    stream: Annotated[str | None, option("--stream", "Redis: the stream.", "KEY")] = None
    max_length: Annotated[
        int | None, option("--max-length", "Redis: about how many entries the stream keeps.")
    ] = None
    nats: Annotated[
        str | None,
        option(
            "--nats",
            "Publish each message to a stream of NATS JetStream: nats://HOST:PORT, or tls://.",
            "URL",
        ),
    ] = None
    nats_subject: Annotated[
        str | None,
        option(
            "--nats-subject",
            "NATS: where to; {subject} (the default), {key} and {id} are those of the message.",
            "TEXT",
        ),
    ] = None
    amqp: Annotated[
        str | None,
        option(
            "--amqp",
            "Publish each message to an exchange of RabbitMQ: "
            "amqp://[USER@]HOST[:PORT]\\[/VHOST], or amqps://; with --exchange.",
            "URL",
        ),
    ] = None
    exchange: Annotated[
        str | None, option("--exchange", "AMQP: empty: the default one.", "NAME")
    ] = None
    routing_key: Annotated[
        str | None,
        option(
            "--routing-key",
            "AMQP: {subject} (the default), {key} and {id} are those of the message.",
            "TEXT",
        ),
    ] = None
    broker_password: Annotated[
        str | None,
        option(
            "--broker-password",
            "The password of --kafka-user, or for the URL of a broker that has none in it.",
            envvar="DELAYSERVER_BROKER_PASSWORD",
        ),
    ] = None

    def fields(self) -> dict[str, Any]:
        """As they stand in a request."""
        waits = [duration(wait, "--backoff") for wait in self.backoff or ()] or None
        limit = {"per_second": self.rate, "burst": self.burst}
        batch = {"max": self.batch, "linger": duration(self.linger, "--linger")}
        receivers = {kind: getattr(self, kind) for kind in RECEIVERS}
        return {
            **_type(receivers, self.broker_password),
            "username": self.kafka_user,
            "password": None if self.kafka_user is None else self.broker_password,
            "mechanism": self.kafka_mechanism,
            "tls": self.kafka_tls or None,
            **{name: getattr(self, name) for name in AS_THEY_ARE},
            "delivery": "exactly_once" if self.exactly_once else None,
            "secret": None if self.previous_secret else self.secret,
            "secrets": _secrets(self.secret, self.previous_secret),
            "headers": header_fields(self.header) if self.header else None,
            "disable_after": duration(self.disable_after, "--disable-after"),
            "timeout": duration(self.timeout, "--timeout"),
            "retry": given({"max_attempts": self.max_attempts, "backoff": waits}) or None,
            "rate": _group(limit, "per_second", "--rate"),
            "batch": _group(batch, "max", "--batch"),
            "catch_up": _catch_up(self.catch_up),
            "lease": duration(self.lease, "--lease"),
        }


@with_options
def subscribe(
    session: Session,
    *,
    name: NameArgument,
    subject: SubjectPatternArgument,
    options: SubscribeOptions,
) -> None:
    """Make a subscription, or change it.

    It receives the messages of its subject that fall due from now on."""
    document = given({"subject": subject, **options.fields()})
    session.show(session.call("PUT", path("subscriptions", name), document))


def _type(receivers: dict[str, str | None], password: str | None) -> dict[str, str]:
    """The type of subscription, and where its messages go; `receivers`: by option."""
    chosen = given(receivers)
    if not chosen:
        return {"type": "pull"}
    kind, receiver = next(iter(chosen.items()))
    if len(chosen) > 1:
        both = " and ".join(f"--{name}" for name in chosen)
        raise typer.BadParameter(f"give one of {both}", param_hint=f"--{kind}")
    if kind == "kafka":
        bootstrap, slash, topic = receiver.partition("/")
        if not slash:
            raise typer.BadParameter("write HOST:PORT/TOPIC", param_hint="--kafka")
        return {"type": "kafka", "bootstrap": bootstrap, "topic": topic}
    if kind != "webhook" and password is not None:
        receiver = _with_password(receiver, password)
    return {"type": kind, "url": receiver}


def _with_password(url: str, password: str) -> str:
    """The server judges the rest of it."""
    scheme, separator, rest = url.partition("://")
    user, at, host = rest.rpartition("@")
    if ":" in user:
        raise typer.BadParameter("the URL holds a password already", param_hint="--broker-password")
    return f"{scheme}{separator}{user}:{quote(password, safe='')}@{host if at else rest}"


def _secrets(secret: str | None, previous: list[str] | None) -> list[str] | None:
    if not previous:
        return None
    if secret is None:
        raise typer.BadParameter("give the new one with --secret", param_hint="--previous-secret")
    return [secret, *previous]


def _group(fields: dict[str, Any], needed: str, option: str) -> dict[str, Any] | None:
    chosen = given(fields)
    if chosen and needed not in chosen:
        raise typer.BadParameter(f"the others need {option}", param_hint=option)
    return chosen or None


def _catch_up(text: str | None) -> object:
    """`spread=10m` as `{"spread": "10m"}`; the server judges it."""
    if text is None or "=" not in text:
        return text
    name, _, length = text.partition("=")
    return {name.replace("-", "_"): duration(length, "--catch-up")}


def subscriptions(
    session: Session,
    *,
    prefix: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Those whose names begin so.")
    ] = None,
) -> None:
    """List all subscriptions, or look at one and change it."""
    query = f"?{urlencode({'prefix': prefix})}" if prefix else ""
    answer = session.call("GET", path("subscriptions") + query)
    columns = (
        *("name", "subject", "type", "url", "topic", "stream", "lease"),
        *("paused", "pause_reason", "queued", "in_flight"),
    )
    empty = "There are no subscriptions; make one with `delayserver subscribe`."
    session.show(answer, lambda: rows(answer["subscriptions"], columns, empty=empty))
