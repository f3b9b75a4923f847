"""dead-letters: what is asked, what is shown."""

import json

import httpx

LETTER = {
    "dead_letter": "17",
    "id": "00ff",
    "subject": "order.unpaid",
    "key": "1001",
    "reason": "HTTP 500 (attempt 10 of 10)",
    "attempts": 10,
    "died_at": "2026-11-20T16:30:00.000Z",
    "headers": {},
    "body": {"order": 1001},
}
PATH = "/v1/subscriptions/shop/dead-letters"


def test_list_follows_the_cursor(cli):
    cli.answer(200, {"dead_letters": [LETTER] * 1000, "cursor": "5"})
    cli.answer(200, {"dead_letters": [LETTER], "cursor": None})
    result = cli.run("dead-letters", "list", "shop", "--limit", "5000", "--json")
    assert len(json.loads(result.stdout)["dead_letters"]) == 1001
    assert [dict(request.url.params) for request in cli.requests] == [
        {"limit": "1000"},
        {"limit": "1000", "cursor": "5"},
    ]


def test_count_says_who_has_some(cli):
    cli.answer(200, {"subscriptions": [{"name": "shop", "count": 1000}], "cursor": None})
    stdout = cli.run("dead-letters", "count").stdout
    assert cli.asked[:2] == ("GET", "/v1/dead-letters?limit=100")
    assert "shop" in stdout and "1,000" in stdout


def test_list_shows_why(cli):
    cli.answer(200, {"dead_letters": [LETTER], "cursor": None})
    stdout = cli.run("dead-letters", "list", "shop").stdout
    assert "HTTP 500" in stdout
    assert "00ff" in stdout
    cli.answer(200, {"dead_letters": [], "cursor": None})
    assert cli.run("dead-letters", "list", "shop").stdout == "shop has no dead letters.\n"


def test_redrive(cli):
    cli.answer(200, {"redriven": 2})
    assert "2" in cli.run("dead-letters", "redrive", "shop", "00ff", "00aa").stdout
    assert cli.asked == ("POST", f"{PATH}/redrive", {"ids": ["00ff", "00aa"]})
    cli.requests.clear()
    cli.answer(200, {"redriven": 7})
    cli.run("dead-letters", "redrive", "shop", "--all")
    assert cli.asked == ("POST", f"{PATH}/redrive", {})


def test_redrive_is_never_all_by_accident(cli):
    for wrong in ((), ("00ff", "--all")):
        result = cli.run("dead-letters", "redrive", "shop", *wrong)
        assert result.exit_code == 2
        assert "--all" in result.stderr
    assert not cli.requests


def test_delete(cli):
    cli.answers += [httpx.Response(204), httpx.Response(204)]
    assert "2" in cli.run("dead-letters", "delete", "shop", "00ff", "00aa").stdout
    assert [request.url.path for request in cli.requests] == [f"{PATH}/00ff", f"{PATH}/00aa"]
    assert {request.method for request in cli.requests} == {"DELETE"}
