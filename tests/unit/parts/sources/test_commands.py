"""sources: what is asked, what is shown."""

from typing import Any

VIEW: dict[str, Any] = {"name": "orders", "subject": "order", "topic": "t", "published": 3}
VIEW |= {"skipped": 1, "paused": False, "error": None}


def test_a_source_is_put(cli, monkeypatch):
    monkeypatch.setenv("DELAYSERVER_BROKER_PASSWORD", "secret")
    cli.answer(201, VIEW)
    result = cli.run(
        *("sources", "put", "orders", "order", "127.0.0.1:9092", "t", "--due-header", "due"),
        *("--group", "g", "--on-error", "stop", "--kafka-user", "u", "--kafka-tls"),
    )
    assert result.exit_code == 0, result.output
    assert cli.asked == (
        "PUT",
        "/v1/sources/orders",
        {
            "type": "kafka",
            "subject": "order",
            "bootstrap": "127.0.0.1:9092",
            "topic": "t",
            "due_header": "due",
            "group": "g",
            "on_error": "stop",
            "username": "u",
            "password": "secret",
            "tls": True,
        },
    )


def test_the_password_of_others_goes_nowhere(cli, monkeypatch):
    monkeypatch.setenv("DELAYSERVER_BROKER_PASSWORD", "secret")
    cli.answer(201, VIEW)
    assert cli.run("sources", "put", "orders", "order", "127.0.0.1:9092", "t").exit_code == 0
    assert "password" not in cli.asked[2]


def test_sources_are_listed(cli):
    cli.answer(200, {"sources": [VIEW], "cursor": None})
    result = cli.run("sources")
    assert result.exit_code == 0 and "orders" in result.stdout, result.output
