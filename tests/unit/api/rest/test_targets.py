"""Where a subscription sends its messages, as fields."""

import importlib.util
from typing import Any

import msgspec
import pytest

from delayserver.api.rest import targets
from delayserver.errors import InputError
from delayserver.security.targets import TargetPolicy
from delayserver.wire.subscriptions import KINDS, SubscriptionRequest, SubscriptionViewModel
from tests.unit.fakes import subscription

GOOD: dict[str, dict[str, Any]] = {
    "kafka": {"bootstrap": "127.0.0.1:9092", "topic": "t"},
    "nats": {"url": "nats://u:secret@127.0.0.1"},
    "amqp": {"url": "amqp://u:secret@127.0.0.1", "exchange": "e"},
    "redis": {"url": "redis://u:secret@127.0.0.1", "stream": "s"},
}


def request(kind: str, **more: Any) -> SubscriptionRequest:
    form: Any = KINDS[kind]
    wanted: SubscriptionRequest = form(subject="s", **GOOD[kind], **more)
    return wanted


def test_every_broker_is_known_everywhere() -> None:
    assert set(GOOD) == KINDS.keys() - {"pull", "webhook"} == targets._MODULES.keys()
    known = {one.name for one in msgspec.structs.fields(SubscriptionViewModel)}
    for kind, given in GOOD.items():
        target = targets.target_of(request(kind), TargetPolicy())
        shown = targets.target_fields(subscription(type=kind, target=target))
        assert set(given) <= set(shown) <= known
        assert "secret" not in str(shown)


@pytest.mark.parametrize("kind", GOOD)
def test_what_is_not_installed_is_named(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "find_spec", lambda module: None)
    with pytest.raises(InputError) as caught:
        targets.target_of(request(kind), TargetPolicy())
    assert caught.value.pointer == "/type"
    assert f"delayserver[{kind}]" in caught.value.detail


@pytest.mark.parametrize("kind", GOOD)
def test_the_allow_list_is_asked(kind: str) -> None:
    with pytest.raises(InputError) as caught:
        targets.target_of(request(kind), TargetPolicy(("10.0.0.0/8",)))
    assert "webhook_targets" in caught.value.detail


def test_the_login_of_kafka() -> None:
    login = {"username": "u", "password": "secret", "mechanism": "SCRAM-SHA-512", "tls": True}
    target = targets.target_of(request("kafka", **login), TargetPolicy())
    shown = targets.target_fields(subscription(type="kafka", target=target))
    assert shown.items() >= {**login, "password": "***"}.items()
    plain = targets.target_of(request("kafka"), TargetPolicy())
    assert "username" not in targets.target_fields(subscription(type="kafka", target=plain))


@pytest.mark.parametrize(
    ("fields", "pointer"),
    [
        ({"username": "u"}, "/password"),
        ({"password": "p"}, "/password"),
        ({"mechanism": "PLAIN"}, "/mechanism"),
        ({"username": "u", "password": "***"}, "/password"),
        ({"tls": True, "delivery": "exactly_once"}, "/delivery"),
    ],
)
def test_a_login_that_is_none(fields: dict[str, Any], pointer: str) -> None:
    with pytest.raises(InputError) as caught:
        targets.target_of(request("kafka", **fields), TargetPolicy())
    assert caught.value.pointer == pointer


def test_the_modules_are_there() -> None:
    for module in targets._MODULES.values():
        assert importlib.util.find_spec(module) is not None
