"""Where a subscription sends its messages: fields of JSON, what is stored, and fields again.

Each type of subscription has fields of its own. Those of brokers become a `Target`, which is
checked against the allow list first; a broker whose client is not installed is refused by the name
of the extra that brings it.

Cost: 10 µs. Threads: pure functions.
"""

import asyncio
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import msgspec

from delayserver.api.rest import models
from delayserver.delivery.outlets import missing_client
from delayserver.errors import InputError
from delayserver.records.subscriptions import (
    MASK,
    AmqpTarget,
    KafkaTarget,
    NatsTarget,
    RedisTarget,
    Subscription,
    Target,
)
from delayserver.security.broker_urls import masked
from delayserver.security.targets import TargetPolicy, split_bootstrap

BROKERS: Final = ("kafka", "redis", "nats", "amqp")
_ONLY_OF: Final[Mapping[str, tuple[str, ...]]] = {
    "url": ("webhook", "redis", "nats", "amqp"),
    "secret": ("webhook",),
    "secrets": ("webhook",),
    "rate": ("webhook", *BROKERS),
    "batch": ("webhook",),
    "headers": ("webhook",),
    "method": ("webhook",),
    "disable_after": ("webhook",),
    "bootstrap": ("kafka",),
    "topic": ("kafka",),
    "key": ("kafka",),
    "delivery": ("kafka",),
    "username": ("kafka",),
    "password": ("kafka",),
    "mechanism": ("kafka",),
    "tls": ("kafka",),
    "stream": ("redis",),
    "max_length": ("redis",),
    "nats_subject": ("nats",),
    "exchange": ("amqp",),
    "routing_key": ("amqp",),
}
_NEEDED_BY: Final[Mapping[str, tuple[str, ...]]] = {
    "webhook": ("url",),
    "kafka": ("bootstrap", "topic"),
    "redis": ("url", "stream"),
    "nats": ("url",),
    "amqp": ("url", "exchange"),
}
_MODULES: Final = {
    "kafka": "confluent_kafka",
    "redis": "redis",
    "nats": "nats",
    "amqp": "aiormq",
}
"""What is imported for a type, which has an extra of its name."""


def check_fields(wanted: models.SubscriptionModel) -> None:
    """Whether a subscription of its type has these fields. Raises InputError."""
    for field, types in _ONLY_OF.items():
        if wanted.type not in types and getattr(wanted, field) is not None:
            raise InputError(f"a subscription of type {wanted.type} has none", f"/{field}")
    for field in _NEEDED_BY.get(wanted.type, ()):
        if getattr(wanted, field) is None:
            raise InputError(f"a subscription of type {wanted.type} needs it", f"/{field}")


async def load_client(kind: str) -> None:
    """Import the client for a type in a thread: it may take 0.3 s, in which others are served."""
    if kind in _MODULES and find_spec(_MODULES[kind]) is not None:
        await asyncio.to_thread(import_module, f"delayserver.delivery.{kind}_sink")


def target_of(wanted: models.SubscriptionModel, policy: TargetPolicy) -> Target | None:
    """What a broker does with messages; None: no broker gets them.

    `check_fields` comes before. Raises InputError."""
    make = _MAKERS.get(wanted.type)
    if make is None:
        return None
    if find_spec(_MODULES[wanted.type]) is None:
        raise InputError(missing_client(wanted.type), "/type")
    return make(wanted, policy)


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


def source_topic(wanted: models.SourceModel, policy: TargetPolicy) -> KafkaTarget:
    """The topic that a source reads. Raises InputError."""
    if find_spec(_MODULES[wanted.type]) is None:
        raise InputError(missing_client(wanted.type), "/type")
    return _topic(wanted, wanted.bootstrap, wanted.topic, policy)


def topic_fields(target: KafkaTarget) -> dict[str, Any]:
    """Where a topic is, as somebody may see it."""
    return {
        "bootstrap": target.bootstrap,
        "topic": target.topic,
        "tls": target.tls or None,
        **(_login(target) if target.username else {}),
    }


def _topic(
    wanted: models.SubscriptionModel | models.SourceModel,
    bootstrap: str,
    topic: str,
    policy: TargetPolicy,
) -> KafkaTarget:
    """A topic, and whom its brokers let in."""
    for broker in split_bootstrap(bootstrap):
        policy.check_broker(broker)
    if topic in (".", ".."):
        raise InputError("no topic may have that name", "/topic")
    for field, given in {"password": wanted.password, "mechanism": wanted.mechanism}.items():
        if given is not None and wanted.username is None:
            raise InputError("it needs a username", f"/{field}")
    if wanted.username is not None and wanted.password is None:
        raise InputError("a username needs its password", "/password")
    if wanted.password == MASK:
        raise InputError(f"{MASK} stands for a password in answers; write it", "/password")
    return KafkaTarget(
        bootstrap=bootstrap,
        topic=topic,
        username=wanted.username or "",
        password=wanted.password or "",
        mechanism=wanted.mechanism or "PLAIN",
        tls=bool(wanted.tls),
    )


def _kafka(wanted: models.SubscriptionModel, policy: TargetPolicy) -> KafkaTarget:
    assert wanted.bootstrap is not None and wanted.topic is not None
    target = _topic(wanted, wanted.bootstrap, wanted.topic, policy)
    if wanted.delivery == "exactly_once" and (wanted.username is not None or wanted.tls):
        raise InputError(
            "exactly_once goes to the brokers of the cluster, as --kafka-config says", "/delivery"
        )
    return msgspec.structs.replace(
        target,
        key="{key}" if wanted.key is None else wanted.key,
        exactly_once=wanted.delivery == "exactly_once",
    )


def _redis(wanted: models.SubscriptionModel, policy: TargetPolicy) -> RedisTarget:
    from delayserver.delivery.redis_sink import split_redis_url

    assert wanted.url is not None and wanted.stream is not None
    parts, _ = split_redis_url(wanted.url)
    policy.check_broker(parts.target, "/url")
    return RedisTarget(url=wanted.url, stream=wanted.stream, max_length=wanted.max_length or 0)


def _nats(wanted: models.SubscriptionModel, policy: TargetPolicy) -> NatsTarget:
    from delayserver.delivery.nats_sink import check_subject, split_nats_url

    assert wanted.url is not None
    policy.check_broker(split_nats_url(wanted.url).target, "/url")
    subject = "{subject}" if wanted.nats_subject is None else wanted.nats_subject
    check_subject(subject)
    return NatsTarget(url=wanted.url, subject=subject)


def _amqp(wanted: models.SubscriptionModel, policy: TargetPolicy) -> AmqpTarget:
    from delayserver.delivery.amqp_sink import split_amqp_url

    assert wanted.url is not None and wanted.exchange is not None
    parts, _ = split_amqp_url(wanted.url)
    policy.check_broker(parts.target, "/url")
    routing_key = "{subject}" if wanted.routing_key is None else wanted.routing_key
    return AmqpTarget(url=wanted.url, exchange=wanted.exchange, routing_key=routing_key)


_MAKERS: Final[Mapping[str, Callable[[models.SubscriptionModel, TargetPolicy], Target]]] = {
    "kafka": _kafka,
    "redis": _redis,
    "nats": _nats,
    "amqp": _amqp,
}
