"""The target of a subscription: fields of JSON, the stored form, and fields again.

The fields of brokers become a `Target`, which is checked against the allow list first; a broker
whose client is not installed is refused by the name of the extra that brings it.

Cost: 10 µs. Threads: pure functions.
"""

import asyncio
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, Protocol

import msgspec

from delayserver.delivery.outlet import missing_client
from delayserver.errors import InputError
from delayserver.records.subscriptions import (
    AmqpTarget,
    KafkaTarget,
    NatsTarget,
    RedisTarget,
    Subscription,
    Target,
)
from delayserver.security.broker_urls import masked
from delayserver.security.targets import TargetPolicy, split_bootstrap
from delayserver.wire.fields import MASK
from delayserver.wire.subscriptions import (
    AmqpSubscription,
    KafkaSubscription,
    NatsSubscription,
    PullSubscription,
    RedisSubscription,
    SubscriptionRequest,
    WebhookSubscription,
)

_MODULES: Final = {
    "kafka": "confluent_kafka",
    "redis": "redis",
    "nats": "nats",
    "amqp": "aiormq",
}
"""The modules that a type needs; an extra of its name brings them."""


class WantedTopic(Protocol):
    """A topic, in the fields that all requests share which name one."""

    @property
    def bootstrap(self) -> str: ...
    @property
    def topic(self) -> str: ...
    @property
    def username(self) -> str | None: ...
    @property
    def password(self) -> str | None: ...
    @property
    def mechanism(self) -> str | None: ...
    @property
    def tls(self) -> bool | None: ...


async def load_client(kind: str) -> None:
    """Import the client for a type in a thread: it may take 0.3 s, in which others are served."""
    if kind in _MODULES and find_spec(_MODULES[kind]) is not None:
        await asyncio.to_thread(import_module, f"delayserver.delivery.{kind}_sink")


def target_of(wanted: SubscriptionRequest, policy: TargetPolicy) -> Target | None:
    """Where a broker puts messages; None: no broker gets them. Raises InputError."""
    if wanted.kind in _MODULES:
        check_client(wanted.kind)
    match wanted:
        case KafkaSubscription():
            return _kafka(wanted, policy)
        case RedisSubscription():
            return _redis(wanted, policy)
        case NatsSubscription():
            return _nats(wanted, policy)
        case AmqpSubscription():
            return _amqp(wanted, policy)
        case WebhookSubscription() | PullSubscription():
            return None


def check_client(kind: str) -> None:
    if find_spec(_MODULES[kind]) is None:
        raise InputError(missing_client(kind), "/type")


def target_fields(subscription: Subscription) -> dict[str, Any]:
    """The fields of a subscription as somebody may see them."""
    match subscription.target:
        case None:
            return {"url": subscription.url or None}
        case KafkaTarget() as target:
            return {
                **topic_fields(target),
                "key": target.key,
                "delivery": "exactly_once" if target.exactly_once else "at_least_once",
            }
        case RedisTarget() as target:
            return {
                "url": masked(target.url),
                "stream": target.stream,
                "max_length": target.max_length or None,
            }
        case NatsTarget() as target:
            return {"url": masked(target.url), "nats_subject": target.subject}
        case AmqpTarget() as target:
            return {
                "url": masked(target.url),
                "exchange": target.exchange,
                "routing_key": target.routing_key,
            }


def _login(target: KafkaTarget) -> dict[str, Any]:
    return {"username": target.username, "password": MASK, "mechanism": target.mechanism}


def topic_fields(target: KafkaTarget) -> dict[str, Any]:
    """Where a topic is, as somebody may see it."""
    return {
        "bootstrap": target.bootstrap,
        "topic": target.topic,
        "tls": target.tls or None,
        **(_login(target) if target.username else {}),
    }


def kafka_topic(wanted: WantedTopic, policy: TargetPolicy) -> KafkaTarget:
    """A topic, and whom its brokers let in. Raises InputError."""
    for broker in split_bootstrap(wanted.bootstrap):
        policy.check_broker(broker)
    if wanted.topic in (".", ".."):
        raise InputError("no topic may have that name", "/topic")
    for field, given in {"password": wanted.password, "mechanism": wanted.mechanism}.items():
        if given is not None and wanted.username is None:
            raise InputError("it needs a username", f"/{field}")
    if wanted.username is not None and wanted.password is None:
        raise InputError("a username needs its password", "/password")
    if wanted.password == MASK:
        raise InputError(f"{MASK} stands for a password in answers; write it", "/password")
    return KafkaTarget(
        bootstrap=wanted.bootstrap,
        topic=wanted.topic,
        username=wanted.username or "",
        password=wanted.password or "",
        mechanism=wanted.mechanism or "PLAIN",
        tls=bool(wanted.tls),
    )


def _kafka(wanted: KafkaSubscription, policy: TargetPolicy) -> KafkaTarget:
    target = kafka_topic(wanted, policy)
    if wanted.delivery == "exactly_once" and (wanted.username is not None or wanted.tls):
        raise InputError(
            "exactly_once goes to the brokers of the cluster, as --kafka-config says", "/delivery"
        )
    return msgspec.structs.replace(
        target,
        key="{key}" if wanted.key is None else wanted.key,
        exactly_once=wanted.delivery == "exactly_once",
    )


def _redis(wanted: RedisSubscription, policy: TargetPolicy) -> RedisTarget:
    from delayserver.delivery.redis_sink import split_redis_url

    parts, _ = split_redis_url(wanted.url)
    policy.check_broker(parts.target, "/url")
    return RedisTarget(url=wanted.url, stream=wanted.stream, max_length=wanted.max_length or 0)


def _nats(wanted: NatsSubscription, policy: TargetPolicy) -> NatsTarget:
    from delayserver.delivery.nats_sink import check_subject, split_nats_url

    policy.check_broker(split_nats_url(wanted.url).target, "/url")
    subject = "{subject}" if wanted.nats_subject is None else wanted.nats_subject
    check_subject(subject)
    return NatsTarget(url=wanted.url, subject=subject)


def _amqp(wanted: AmqpSubscription, policy: TargetPolicy) -> AmqpTarget:
    from delayserver.delivery.amqp_sink import split_amqp_url

    parts, _ = split_amqp_url(wanted.url)
    policy.check_broker(parts.target, "/url")
    routing_key = "{subject}" if wanted.routing_key is None else wanted.routing_key
    return AmqpTarget(url=wanted.url, exchange=wanted.exchange, routing_key=routing_key)
