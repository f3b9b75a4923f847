"""subscribe, subscriptions, pull, ack: what is asked, what is shown."""

import json

LEASED = {
    "id": "00ff",
    "subject": "envelope.refund",
    "key": None,
    "headers": {},
    "body": {"cents": 500},
    "deliver_at": "2026-11-20T16:30:00.000Z",
    "attempt": 1,
    "lease": "L1",
}


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


def test_subscribe_to_pull(cli):
    cli.answer(201, {"name": "wallet"})
    cli.run("subscribe", "wallet", "envelope.refund", "--lease", "1m")
    assert cli.asked[2] == {"subject": "envelope.refund", "type": "pull", "lease": "1m"}


def test_list(cli):
    cli.answer(200, {"subscriptions": [{"name": "shop", "subject": "*", "paused": True}]})
    result = cli.run("subscriptions")
    assert "shop" in result.stdout
    assert "yes" in result.stdout


def test_an_empty_list_says_what_to_do(cli):
    cli.answer(200, {"subscriptions": []})
    assert "delayserver subscribe" in cli.run("subscriptions").stdout


def test_pull_prints_and_acknowledges(cli):
    cli.answer(200, {"messages": [LEASED]})
    cli.answer(200, {"acked": 1, "expired": []})
    result = cli.run("pull", "wallet", "--max", "5", "--wait", "1s", "--lease", "10s")
    assert result.exit_code == 0, result.output
    assert "00ff" in result.stdout
    assert '{"cents": 500}' in result.stdout
    pull, ack = cli.requests
    assert json.loads(pull.content) == {"max": 5, "wait": 1000, "lease": "10s"}
    assert ack.url.path == "/v1/subscriptions/wallet/ack"
    assert json.loads(ack.content) == {"leases": ["L1"]}


def test_the_client_waits_longer_than_the_server(cli):
    cli.answer(200, {"messages": []})
    cli.run("pull", "wallet", "--wait", "50s")
    assert cli.requests[0].extensions["timeout"]["read"] > 50


def test_pull_without_ack_shows_the_lease(cli):
    cli.answer(200, {"messages": [LEASED]})
    assert "L1" in cli.run("pull", "wallet", "--no-ack").stdout
    assert len(cli.requests) == 1


def test_pull_with_nothing_due(cli):
    cli.answer(200, {"messages": []})
    assert cli.run("pull", "wallet").stdout == "No message is due.\n"
    cli.answer(200, {"messages": []})
    assert json.loads(cli.run("pull", "wallet", "--json").stdout) == {"messages": []}


def test_pull_refuses_what_is_no_duration(cli):
    result = cli.run("pull", "wallet", "--wait", "soon")
    assert result.exit_code == 2
    assert "--wait" in result.stderr


def test_ack(cli):
    cli.answer(200, {"acked": 2, "expired": []})
    assert cli.run("ack", "wallet", "L1", "L2").stdout == "2 acknowledged\n"


def test_an_expired_lease_is_a_failure(cli):
    cli.answer(200, {"acked": 1, "expired": ["L2"]})
    result = cli.run("ack", "wallet", "L1", "L2")
    assert result.exit_code == 1
    assert "1 of 2 leases had expired" in result.stderr
    assert "L2" in result.stderr


def test_stats_shows_every_figure(cli):
    cli.answer(200, {"accepted": 12345, "hours": {"loaded": 2}})
    stdout = cli.run("stats").stdout
    assert "12,345" in stdout
    assert "hours.loaded" in stdout
