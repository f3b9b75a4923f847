"""Subscriptions and dead letters of the client library, against a fake server."""

from datetime import timedelta

import pytest

from delayserver.client import AsyncClient, NotFoundError
from tests.unit.client.fake_server import (
    LOST,
    Clock,
    FakeTransport,
    answer,
    asynchronous,
    problem,
)

VIEW = {
    "name": "shop",
    "subject": "order.*",
    "type": "webhook",
    "created_at": "2026-11-20T16:30:00.000Z",
    "paused": False,
    "queued": 3,
    "in_flight": 1,
    "url": "http://127.0.0.1:9000/",
    "retry": {"max_attempts": 3, "backoff": []},
    "catch_up": "all",
}


def make(*replies):
    transport = FakeTransport(*replies)
    return AsyncClient(transport=transport, time=Clock(auto=True).time).subscriptions, transport


@asynchronous
async def test_what_is_given_is_sent_with_the_names_of_the_api():
    subscriptions, transport = make(*[answer(200, VIEW)] * 4)
    plain = await subscriptions.put_webhook("shop", "order.*", "http://127.0.0.1:9000/")
    assert (plain.queued, plain.in_flight, plain.created_at.year) == (3, 1, 2026)
    await subscriptions.put_webhook(
        *("a b", "order.*", "http://127.0.0.1:9000/"),
        secrets=["whsec_a"],
        timeout="15s",
        max_in_flight=3,
        max_attempts=3,
        backoff=["1s", timedelta(seconds=2), 3000],
        per_second=2.5,
        burst=10,
        batch_max=100,
        batch_linger="20ms",
        spread="10m",
        headers={"authorization": "Bearer x"},
        method="PUT",
        disable_after=timedelta(days=3),
    )
    await subscriptions.put_pull("p", "s", lease="1m", max_attempts=2, drop_older_than="1d")
    await subscriptions.put_pull("p", "s")
    url = {"url": "http://127.0.0.1:9000/"}
    assert transport.requests == [
        ("PUT", "/v1/subscriptions/shop", {"subject": "order.*", "type": "webhook", **url}),
        (
            "PUT",
            "/v1/subscriptions/a%20b",
            {
                "subject": "order.*",
                "type": "webhook",
                **url,
                "secrets": ["whsec_a"],
                "headers": {"authorization": "Bearer x"},
                "method": "PUT",
                "disable_after": 259_200_000,
                "timeout": "15s",
                "max_in_flight": 3,
                "retry": {"max_attempts": 3, "backoff": ["1s", 2000, 3000]},
                "rate": {"per_second": 2.5, "burst": 10},
                "batch": {"max": 100, "linger": "20ms"},
                "catch_up": {"spread": "10m"},
            },
        ),
        (
            "PUT",
            "/v1/subscriptions/p",
            {
                "subject": "s",
                "type": "pull",
                "lease": "1m",
                "retry": {"max_attempts": 2},
                "catch_up": {"drop_older_than": "1d"},
            },
        ),
        ("PUT", "/v1/subscriptions/p", {"subject": "s", "type": "pull"}),
    ]


@asynchronous
async def test_a_delete_whose_answer_was_lost_has_worked():
    replies = LOST, problem(404), problem(404), problem(503), answer(204)
    subscriptions, transport = make(*replies)
    await subscriptions.delete("shop")
    with pytest.raises(NotFoundError):
        await subscriptions.delete("shop")
    await subscriptions.delete("shop")
    assert {method for method, *_ in transport.requests} == {"DELETE"}


@asynchronous
async def test_what_goes_to_brokers():
    subscriptions, transport = make(*[answer(200, VIEW)] * 4)
    await subscriptions.put_kafka("k", "s", "b:1", "t", key="{id}", timeout="5s")
    await subscriptions.put_redis("r", "s", "redis://r", "due", max_length=5, per_second=1)
    await subscriptions.put_nats("n", "s", "nats://n", nats_subject="due.{id}")
    await subscriptions.put_amqp("a", "s", "amqp://a", "", routing_key="q", max_in_flight=2)
    assert [request[2] for request in transport.requests] == [
        {
            **{"subject": "s", "type": "kafka", "bootstrap": "b:1", "topic": "t", "key": "{id}"},
            "timeout": "5s",
        },
        {
            **{"subject": "s", "type": "redis", "url": "redis://r", "stream": "due"},
            **{"max_length": 5, "rate": {"per_second": 1}},
        },
        {"subject": "s", "type": "nats", "url": "nats://n", "nats_subject": "due.{id}"},
        {
            **{"subject": "s", "type": "amqp", "url": "amqp://a", "exchange": ""},
            **{"routing_key": "q", "max_in_flight": 2},
        },
    ]
