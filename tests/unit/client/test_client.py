"""One client for each mode: the same groups and calls in both, and every call of the API."""

import inspect
import re
import threading
from typing import Any

import pytest

from delayserver.api.scopes import RULES
from delayserver.client import AsyncClient, Client, ClosedError, NotFoundError
from delayserver.client.groups import AsyncClientDeadLetters
from delayserver.parts.installed import PARTS
from delayserver.wire.bulk import ArchiveModel
from tests.unit.client.fake_server import FakeTransport, asynchronous, message_id, problem

ALL_RULES = {**RULES, **{call: rule for part in PARTS for call, rule in part.rules.items()}}
"""Of all calls of the API, also those that parts add."""

GROUPS = (
    *("messages", "subscriptions", "dead_letters", "schedules", "sources", "heartbeats"),
    *("events", "imports", "backups", "tokens", "cluster"),
)
ID = message_id(1)
ARCHIVE = ArchiveModel(schedule_bytes=1, dispatch_bytes=1, last_seq=1, count=1)
CALLS: dict[str, tuple[Any, ...]] = {
    "messages.publish": ("a",),
    "messages.publish_all": ([],),
    "messages.cancel": (ID,),
    "messages.get": (ID,),
    "messages.move": (ID,),
    "messages.replace": ("a", "k"),
    "messages.attempts": (ID,),
    "messages.replay": (ID,),
    "messages.pending": ("a",),
    "subscriptions.put_pull": ("n", "a"),
    "subscriptions.put_webhook": ("n", "a", "http://127.0.0.1"),
    "subscriptions.put_kafka": ("n", "a", "127.0.0.1:9092", "t"),
    "subscriptions.put_redis": ("n", "a", "redis://127.0.0.1", "s"),
    "subscriptions.put_nats": ("n", "a", "nats://127.0.0.1"),
    "subscriptions.put_amqp": ("n", "a", "amqp://127.0.0.1", "e"),
    "subscriptions.get": ("n",),
    "subscriptions.list": (),
    "subscriptions.pause": ("n",),
    "subscriptions.resume": ("n",),
    "subscriptions.delete": ("n",),
    "dead_letters.list": ("n",),
    "dead_letters.counts": (),
    "dead_letters.redrive": ("n",),
    "dead_letters.discard": ("n", ID),
    "schedules.put": ("n", "a"),
    "schedules.preview": (),
    "schedules.get": ("n",),
    "schedules.list": (),
    "schedules.pause": ("n",),
    "schedules.resume": ("n",),
    "schedules.trigger": ("n",),
    "schedules.delete": ("n",),
    "sources.put": ("n", "a", "127.0.0.1:9092", "t"),
    "sources.get": ("n",),
    "sources.list": (),
    "sources.pause": ("n",),
    "sources.resume": ("n",),
    "sources.delete": ("n",),
    "heartbeats.put": ("k",),
    "heartbeats.get": ("k",),
    "heartbeats.delete": ("k",),
    "events.send": ("k",),
    "imports.begin": ("i", ["a"]),
    "imports.adopt": ("m",),
    "imports.get": ("i",),
    "imports.duplicates": ("i",),
    "imports.archives": (),
    "imports.confirm_archive": ("2026-11-20T15", ARCHIVE),
    "backups.begin": (),
    "backups.get": ("n",),
    "backups.list": (),
    "backups.delete": ("n",),
    "backups.wait": ("n",),
    "tokens.own": (),
    "tokens.list": (),
    "cluster.map": (),
    "cluster.stats": (),
    "cluster.forecast": (),
    "cluster.subjects": (),
    "cluster.metrics": (),
    "cluster.is_alive": (),
    "cluster.is_ready": (),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "messages.move": {"delay": "1h"},
    "schedules.preview": {"every": "1h", "subject": "a"},
    "schedules.put": {"every": "1h"},
    "heartbeats.put": {"timeout": "10s", "subject": "a"},
}
ELSEWHERE = {
    ("POST", "/v1/messages"): "a publish goes out in a batch, also alone",
    **{
        ("POST", f"/v1/subscriptions/{{name}}/{call}"): "tests/unit/client/test_consumer.py"
        for call in ("pull", "ack", "nack", "extend")
    },
}


def calls_of(kind: type) -> set[str]:
    """Public methods, without those that open and close."""
    methods = inspect.getmembers(kind, inspect.isfunction)
    return {name for name, _ in methods if name[0] != "_"} - {"close", "after_fork"}


def refusing() -> FakeTransport:
    return FakeTransport(default=lambda method, path, document: problem(404))


@pytest.mark.parametrize("group", GROUPS)
def test_both_modes_have_the_same_calls_with_the_same_arguments(group):
    one, other = (getattr(kind(transport=refusing()), group) for kind in (AsyncClient, Client))
    assert calls_of(type(one)) == calls_of(type(other))
    for name in calls_of(type(one)):
        assert inspect.signature(getattr(one, name)) == inspect.signature(getattr(other, name))
    expected = {call.split(".")[1] for call in CALLS if call.split(".")[0] == group}
    assert calls_of(type(one)) == expected


@pytest.mark.parametrize("kind", [AsyncClient, Client])
def test_a_client_has_these_groups_and_no_others(kind):
    client = kind(transport=refusing())
    assert {name for name in vars(client) if name[0] != "_"} == set(GROUPS)
    assert inspect.signature(kind) == inspect.signature(AsyncClient)


def test_every_call_of_the_api_is_a_call_of_the_client():
    transport = refusing()
    with Client(transport=transport) as client:
        for call, arguments in CALLS.items():
            group, name = call.split(".")
            before = len(transport.requests)
            try:
                found = getattr(getattr(client, group), name)(*arguments, **OPTIONS.get(call, {}))
                if inspect.isgenerator(found):
                    list(found)
            except NotFoundError:
                pass
            assert len(transport.requests) > before or call == "messages.publish_all", call
    with Client(transport=transport) as client:
        messages = client.messages
        for one in (
            lambda: messages.get(subject="a", key="k"),
            lambda: messages.move(subject="a", key="k", delay="1h"),
            lambda: messages.cancel(subject="a", key="k", if_match="v"),
            lambda: messages.cancel(ID, if_match="v"),  # without a version it goes in a batch
        ):
            with pytest.raises(NotFoundError):
                one()
    asked = {(method, path.partition("?")[0]) for method, path, _ in transport.requests}
    templates = sorted(ALL_RULES, key=lambda rule: rule[1].count("{"))

    def of(method: str, path: str) -> tuple[str, str]:
        fitting = (
            rule
            for rule in templates
            if rule[0] == method and re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", rule[1]), path)
        )
        return next(fitting)

    reached = {of(method, path) for method, path in asked}
    assert set(ALL_RULES) - reached - ELSEWHERE.keys() == set()


def test_one_thread_serves_all_groups_of_a_client():
    before = set(threading.enumerate())
    transport = refusing()
    client = Client(transport=transport)
    assert set(threading.enumerate()) == before
    for call in (client.tokens.own, client.cluster.map, lambda: client.messages.get(ID)):
        with pytest.raises(NotFoundError):
            call()
    assert len(set(threading.enumerate()) - before) == 1
    client.close()
    client.close()  # the second time it is closed already
    assert set(threading.enumerate()) == before and transport.closed
    with pytest.raises(ClosedError):
        client.tokens.own()


@asynchronous
async def test_a_closed_client_takes_no_call_in_any_group():
    async with AsyncClient(transport=refusing()) as client:
        pass
    for call in (client.tokens.own(), client.events.send("k"), client.schedules.get("n")):
        with pytest.raises(ClosedError):
            await call


@pytest.mark.parametrize("kind", [AsyncClient, Client])
def test_a_consumer_takes_its_server_from_the_client(kind):
    client = kind("http://127.0.0.1:1", token="t", transport=(transport := refusing()))
    consumer = client.consumer(concurrency=3)
    inner = getattr(consumer, "_consumer", consumer)
    assert (inner._transport, inner._concurrency) == (transport, 3)


def test_a_call_that_is_documented_once_is_documented_in_both_modes():
    assert inspect.getdoc(Client(transport=refusing()).dead_letters.counts) == inspect.getdoc(
        AsyncClientDeadLetters.counts
    )
