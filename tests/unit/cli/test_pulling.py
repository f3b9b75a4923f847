"""pull, ack, nack, extend: what is asked, what is shown."""

import json

import pytest

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


def test_what_was_pulled_is_printed_before_it_is_acknowledged(cli):
    """What cannot be printed comes again, and an ack that is too late hides nothing."""
    cli.answer(200, {"messages": [LEASED]})
    cli.answer(200, {"acked": 0, "expired": ["L1"]})
    result = cli.run("pull", "wallet")
    assert result.exit_code == 1
    assert '{"cents": 500}' in result.stdout
    assert "1 of 1 leases had expired" in result.stderr


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


@pytest.mark.parametrize(
    ("arguments", "document", "answer", "shown"),
    [
        (("nack",), {"delay": 0}, {"nacked": 1}, "1 given back"),
        (("nack", "--delay", "5m"), {"delay": "5m"}, {"nacked": 1}, "1 given back"),
        (("extend", "--lease", "2m"), {"lease": "2m"}, {"extended": 1}, "1 extended"),
    ],
)
def test_nack_and_extend(cli, arguments, document, answer, shown):
    call, *options = arguments
    cli.answer(200, {**answer, "expired": []})
    result = cli.run(call, "wallet", "L1", *options)
    assert cli.asked == ("POST", f"/v1/subscriptions/wallet/{call}", {"leases": ["L1"], **document})
    assert result.stdout == shown + "\n"
    cli.answer(200, {**answer, "expired": ["L1"]})
    assert cli.run(call, "wallet", "L1", *options).exit_code == 1


def test_extend_wants_to_know_for_how_long(cli):
    assert cli.run("extend", "wallet", "L1").exit_code == 2
