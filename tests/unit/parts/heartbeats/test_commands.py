"""heartbeat and event: what is asked, what is shown."""

import pytest


def test_a_heartbeat_is_put(cli):
    answer = {"key": "w/7", "timeout": "10s", "subject": "lost", "expires_at": "2026-11-20T16:30Z"}
    cli.answer(201, answer)
    result = cli.run(
        *("heartbeat", "put", "w/7", "lost", '{"n": 1}', "--timeout", "10s"),
        *("--header", "x-shop=7"),
    )
    assert result.exit_code == 0, result.output
    assert cli.asked == (
        "PUT",
        "/v1/heartbeats/w%2F7",
        {"timeout": "10s", "subject": "lost", "headers": {"x-shop": "7"}, "body": {"n": 1}},
    )
    assert "2026-11-20T16:30Z" in result.stdout


@pytest.mark.parametrize(
    ("command", "method", "status"), [("get", "GET", 200), ("delete", "DELETE", 204)]
)
def test_a_heartbeat_is_shown_and_ended(cli, command, method, status):
    cli.answer(status, {"key": "w"})
    result = cli.run("heartbeat", command, "w")
    assert result.exit_code == 0, result.output
    assert cli.asked == (method, "/v1/heartbeats/w", None)


def test_an_event_says_what_it_did(cli):
    cli.answer(200, {"cancelled": 1234, "fired": 2})
    result = cli.run("event", "order:1001")
    assert cli.asked == ("POST", "/v1/events/order%3A1001", None)
    assert result.stdout == "1,234 cancelled, 2 delivered now.\n"


def test_a_message_that_watches_is_published(cli):
    cli.answer(201, {"id": "1"})
    cli.run("publish", "s", "1", "--watch", "a", "--watch", "b", "--on-event", "fire")
    assert cli.asked[2] == {"subject": "s", "body": 1, "watch": ["a", "b"], "on_event": "fire"}
