"""messages attempts, messages replay: the requests they make, and the answers they show."""

import pytest


def test_attempts(cli):
    one = {"subscription": "shop", "attempt": 1, "outcome": "failed", "error": "HTTP 500"}
    cli.answer(200, {"attempts": [one], "dropped": 0})
    result = cli.run("messages", "attempts", "00ff")
    assert cli.asked == ("GET", "/v1/messages/00ff/attempts", None)
    assert "shop" in result.stdout and "HTTP 500" in result.stdout


def test_attempts_that_were_left_out_are_counted(cli):
    one = {"subscription": "shop", "attempt": 1, "outcome": "failed", "error": "HTTP 500"}
    cli.answer(200, {"attempts": [one], "dropped": 7})
    assert "7 more" in cli.run("messages", "attempts", "00ff").stdout
    cli.answer(200, {"attempts": [], "dropped": 0})
    assert "No attempt" in cli.run("messages", "attempts", "00ff").stdout


@pytest.mark.parametrize(
    ("options", "query"), [((), ""), (("--subscription", "shop"), "?subscription=shop")]
)
def test_replay(cli, options, query):
    cli.answer(200, {"id": "00ff", "state": "delivering", "subscriptions": ["shop", "crm"]})
    result = cli.run("messages", "replay", "00ff", *options)
    assert cli.asked == ("POST", f"/v1/messages/00ff/replay{query}", None)
    assert "shop, crm" in result.stdout
