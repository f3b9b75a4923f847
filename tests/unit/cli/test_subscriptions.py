"""subscribe and subscriptions: what is asked, what is shown."""

import httpx
import pytest


def test_subscribe_a_webhook(cli):
    cli.answer(201, {"name": "shop"})
    cli.run(
        *("subscribe", "shop", "order.*", "--webhook", "http://127.0.0.1:9000/", "--timeout", "5s"),
        *("--max-in-flight", "8", "--max-attempts", "3", "--backoff", "1s", "--backoff", "500"),
    )
    assert cli.asked == (
        "PUT",
        "/v1/subscriptions/shop",
        {
            "subject": "order.*",
            "type": "webhook",
            "url": "http://127.0.0.1:9000/",
            "timeout": "5s",
            "max_in_flight": 8,
            "retry": {"max_attempts": 3, "backoff": ["1s", 500]},
        },
    )


def test_subscribe_with_limits(cli):
    cli.answer(201, {"name": "sms"})
    result = cli.run(
        *("subscribe", "sms", "sms", "--webhook", "http://127.0.0.1:9000/", "--rate", "2.5"),
        *("--burst", "7", "--batch", "100", "--linger", "20ms", "--catch-up", "spread=10m"),
        *("--secret", "whsec_new", "--previous-secret", "whsec_old", "--method", "PUT"),
        *("--header", "authorization=Bearer a=b", "--header", "x-a=1", "--disable-after", "3d"),
    )
    assert result.exit_code == 0, result.output
    assert cli.asked[2] == {
        "subject": "sms",
        "type": "webhook",
        "url": "http://127.0.0.1:9000/",
        "secrets": ["whsec_new", "whsec_old"],
        "headers": {"authorization": "Bearer a=b", "x-a": "1"},
        "method": "PUT",
        "disable_after": "3d",
        "rate": {"per_second": 2.5, "burst": 7},
        "batch": {"max": 100, "linger": "20ms"},
        "catch_up": {"spread": "10m"},
    }


@pytest.mark.parametrize(
    ("option", "sent"),
    [
        ("all", "all"),
        ("drop-older-than=1h", {"drop_older_than": "1h"}),
        ("spread=5", {"spread": 5}),
    ],
)
def test_ways_to_catch_up(cli, option, sent):
    cli.answer(201, {"name": "x"})
    cli.run("subscribe", "x", "x", "--catch-up", option)
    assert cli.asked[2]["catch_up"] == sent


@pytest.mark.parametrize(
    ("option", "needed"),
    [("--burst=7", "--rate"), ("--linger=1s", "--batch"), ("--previous-secret=x", "--secret")],
)
def test_what_means_nothing_alone_is_refused(cli, option, needed):
    result = cli.run("subscribe", "x", "x", "--webhook", "http://127.0.0.1:9000/", option)
    assert result.exit_code == 2
    assert needed in result.output
    assert not cli.requests


def test_subscribe_to_pull(cli):
    cli.answer(201, {"name": "wallet"})
    cli.run("subscribe", "wallet", "envelope.refund", "--lease", "1m")
    assert cli.asked[2] == {"subject": "envelope.refund", "type": "pull", "lease": "1m"}


def test_list(cli):
    cli.answer(200, {"subscriptions": [{"name": "shop", "subject": "*", "paused": True}]})
    result = cli.run("subscriptions")
    assert "shop" in result.stdout
    assert "yes" in result.stdout


def test_a_list_may_be_of_names_that_begin_alike(cli):
    cli.answer(200, {"subscriptions": [], "cursor": None})
    cli.run("subscriptions", "--prefix", "shop&")
    assert cli.asked[:2] == ("GET", "/v1/subscriptions?prefix=shop%26")


def test_an_empty_list_says_what_to_do(cli):
    cli.answer(200, {"subscriptions": []})
    assert "delayserver subscribe" in cli.run("subscriptions").stdout


@pytest.mark.parametrize(
    ("command", "method", "path"),
    [
        ("show", "GET", "/v1/subscriptions/shop"),
        ("pause", "POST", "/v1/subscriptions/shop/pause"),
        ("resume", "POST", "/v1/subscriptions/shop/resume"),
    ],
)
def test_one_subscription(cli, command, method, path):
    cli.answer(200, {"name": "shop", "paused": True, "queued": 1234})
    result = cli.run("subscriptions", command, "shop")
    assert cli.asked == (method, path, None)
    assert "1,234" in result.stdout


def test_delete(cli):
    cli.answers.append(httpx.Response(204))
    assert cli.run("subscriptions", "delete", "shop").stdout == "shop is deleted\n"
    assert cli.asked == ("DELETE", "/v1/subscriptions/shop", None)


def test_list_by_name(cli):
    cli.answer(200, {"subscriptions": [{"name": "shop"}]})
    assert "shop" in cli.run("subscriptions", "list", "--json").stdout


def test_options_of_the_list_are_not_lost_silently(cli):
    result = cli.run("subscriptions", "--json", "pause", "shop")
    assert result.exit_code == 2
    assert "behind that word" in result.stderr
    assert not cli.requests


def test_help_names_the_commands(cli):
    stdout = cli.run("subscriptions", "--help").stdout
    for command in ("list", "show", "pause", "resume", "delete"):
        assert command in stdout
    assert not cli.requests


def test_subscribe_a_stream_of_redis(cli):
    cli.answer(201, {"name": "due"})
    result = cli.run(
        *("subscribe", "due", "order.*", "--redis", "redis://u@r:1/2", "--stream", "s"),
        *("--max-length", "9", "--broker-password", "p@ss"),
    )
    assert result.exit_code == 0, result.output
    assert cli.asked[2] == {
        "subject": "order.*",
        "type": "redis",
        "url": "redis://u:p%40ss@r:1/2",
        "stream": "s",
        "max_length": 9,
    }


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (
            ("--nats", "nats://n", "--nats-subject", "due.{id}", "--broker-password", "p"),
            {"type": "nats", "url": "nats://:p@n", "nats_subject": "due.{id}"},
        ),
        (
            ("--kafka", "b:1/t", "--kafka-user", "u", "--broker-password", "p", "--kafka-tls"),
            {
                **{"type": "kafka", "bootstrap": "b:1", "topic": "t"},
                **{"username": "u", "password": "p", "tls": True},
            },
        ),
        (
            ("--amqp", "amqp://u@a/v", "--exchange", "", "--routing-key", "q"),
            {"type": "amqp", "url": "amqp://u@a/v", "exchange": "", "routing_key": "q"},
        ),
    ],
)
def test_subscribe_other_brokers(cli, words, fields):
    cli.answer(201, {"name": "due"})
    result = cli.run("subscribe", "due", "order.*", *words)
    assert result.exit_code == 0, result.output
    assert cli.asked[2] == {"subject": "order.*", **fields}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--redis", "redis://r", "--kafka", "b:1/t"), "give one of"),
        (("--redis", "redis://u:p@r", "--broker-password", "x"), "holds a password already"),
        (("--kafka", "b:1"), "HOST:PORT/TOPIC"),
    ],
)
def test_brokers_that_are_wrong(cli, words, text):
    result = cli.run("subscribe", "due", "order.*", *words)
    assert result.exit_code == 2
    assert text in " ".join(result.stderr.replace("│", " ").split())
