"""publish, get, cancel, move: what is asked, what is shown."""

import json

import pytest

PUBLISHED = {
    "id": "00ff",
    "subject": "order.unpaid",
    "key": "1001",
    "deliver_at": "2026-11-20T16:30:00.000Z",
    "state": "scheduled",
    "duplicate": False,
}


def test_publish_sends_everything_that_was_given(cli):
    cli.answer(201, PUBLISHED)
    result = cli.run(
        *("publish", "order.unpaid", '{"order": 1001}', "--delay", "30m", "--key", "1001"),
        *("--header", "x-shop=7", "--header", "x-note=a=b"),
        *("--ttl", "1h", "--jitter", "500", "--priority", "9", "--group", "shop:7"),
        *("--to", "http://a/", "--to-secret", "whsec_x", "--to-timeout", "5s"),
        *("--to-max-attempts", "2", "--to-backoff", "1s", "--to-backoff", "1m"),
        *("--on-delivered", "paid", "--on-dead", "lost"),
    )
    assert result.exit_code == 0, result.output
    assert cli.asked == (
        "POST",
        "/v1/messages",
        {
            "subject": "order.unpaid",
            "body": {"order": 1001},
            "delay": "30m",
            "key": "1001",
            "headers": {"x-shop": "7", "x-note": "a=b"},
            "ttl": "1h",
            "jitter": 500,
            "priority": 9,
            "to": {
                "url": "http://a/",
                "secret": "whsec_x",
                "timeout": "5s",
                "retry": {"max_attempts": 2, "backoff": ["1s", "1m"]},
            },
            "on_delivered": {"subject": "paid"},
            "on_dead": {"subject": "lost"},
            "group": "shop:7",
        },
    )
    assert "00ff" in result.stdout
    assert "2026-11-20T16:30:00.000Z" in result.stdout


def test_a_publish_says_where_it_goes_before_it_says_how(cli):
    result = cli.run("publish", "s", "1", "--to-timeout", "5s")
    assert result.exit_code == 2
    assert "--to" in result.output


def test_publish_with_json_prints_the_answer(cli):
    cli.answer(201, PUBLISHED)
    result = cli.run("publish", "order.unpaid", "null", "--json")
    assert json.loads(result.stdout) == PUBLISHED
    assert cli.asked[2] == {"subject": "order.unpaid", "body": None}


def test_body_goes_out_as_it_was_written(cli):
    cli.answer(201, PUBLISHED)
    cli.run("publish", "s", '{"n": 1.10000000000000000001, "n": 2e400}')
    assert b'"body": {"n": 1.10000000000000000001, "n": 2e400}' in cli.requests[0].content


def test_body_from_standard_input(cli):
    cli.answer(201, PUBLISHED)
    cli.run("publish", "s", "-", stdin="[1, 2]\n")
    assert cli.asked[2]["body"] == [1, 2]


def test_body_from_a_file(cli, tmp_path):
    (tmp_path / "body.json").write_text('"Grüße"')
    cli.answer(201, PUBLISHED)
    cli.run("publish", "s", f"@{tmp_path / 'body.json'}")
    assert cli.asked[2]["body"] == "Grüße"


def test_a_time_is_text_or_milliseconds(cli):
    for at in ("2026-11-20T17:30:00+01:00", "1795192200000"):
        cli.answer(201, PUBLISHED)
        cli.run("publish", "s", "1", "--at", at)
    first, second = (json.loads(request.content)["deliver_at"] for request in cli.requests)
    assert first == "2026-11-20T17:30:00+01:00"
    assert second == 1795192200000


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("publish", "s", "hello"), "not JSON"),
        (("publish", "s", "NaN"), "not JSON"),
        (("publish", "s", "@/no/such/file"), "cannot read the body"),
        (("publish", "s", "1", "--delay", "1s", "--at", "5"), "either --delay or --at"),
        (("publish", "s", "1", "--header", "x"), "no '='"),
        (("publish", "s", "1", "--header", "x=1", "--header", "x=2"), "twice"),
        (("publish", "s"), "BODY"),
        (("get",), "either ID, or both --subject and --key"),
        (("get", "00ff", "--key", "1"), "either ID, or both --subject and --key"),
        (("cancel", "--subject", "s"), "either ID, or both --subject and --key"),
        (("move", "00ff"), "--delay or --at"),
        (("nothing",), "nothing"),
    ],
)
def test_wrong_usage_asks_nothing(cli, arguments, complaint):
    result = cli.run(*arguments)
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert not cli.requests


def test_get_by_id(cli):
    cli.answer(200, {"id": "00ff", "state": "delivered", "deliveries": [{"attempt": 1}]})
    result = cli.run("get", "00ff")
    assert cli.asked == ("GET", "/v1/messages/00ff", None)
    assert "delivered" in result.stdout


def test_a_key_may_hold_anything(cli):
    cli.answer(200, {"id": "00ff", "state": "cancelled"})
    cli.run("cancel", "--subject", "order.unpaid", "--key", "a/b ?ü")
    assert cli.asked[:2] == ("DELETE", "/v1/subjects/order.unpaid/keys/a%2Fb%20%3F%C3%BC")


def test_move(cli):
    cli.answer(200, {"id": "00ff", "deliver_at": "2026-11-20T16:45:00.000Z"})
    cli.run("move", "00ff", "--delay", "1500")
    assert cli.asked == ("PATCH", "/v1/messages/00ff", {"delay": 1500})


def test_markup_in_a_message_is_shown_as_it_is(cli):
    cli.answer(200, {"id": "00ff", "body": "[bold]x[/bold] [/nothing]"})
    assert "[bold]x[/bold] [/nothing]" in cli.run("get", "00ff").stdout


def pending(number):
    return {
        "id": f"{number:04}",
        "subject": "order.unpaid",
        "key": None,
        "deliver_at": "2026-11-20T16:30:00.000Z",
        "state": "scheduled",
        "attempts": 0,
        "headers": {},
        "body": number,
    }


def test_list_follows_the_cursor_until_it_has_enough(cli):
    cli.answer(200, {"messages": [pending(n) for n in range(1000)], "cursor": "5-1"})
    cli.answer(200, {"messages": [], "cursor": "6-1"})
    cli.answer(200, {"messages": [pending(1000)], "cursor": "7-1"})
    result = cli.run("list", "order.unpaid", "--from", "5", "--limit", "1001", "--json")
    assert result.exit_code == 0, result.output
    queries = [dict(request.url.params) for request in cli.requests]
    assert queries == [
        {"from": "5", "limit": "1000"},
        {"from": "5", "limit": "1", "cursor": "5-1"},
        {"from": "5", "limit": "1", "cursor": "6-1"},
    ]
    answer = json.loads(result.stdout)
    assert len(answer["messages"]) == 1001
    assert answer["cursor"] == "7-1"


def test_list_shows_a_table_or_says_that_there_is_nothing(cli):
    cli.answer(200, {"messages": [pending(7)], "cursor": None})
    assert "0007" in cli.run("list", "order.unpaid").stdout
    cli.answer(200, {"messages": [], "cursor": None})
    assert "Nothing of order.unpaid is pending." in cli.run("list", "order.unpaid").stdout


def test_replace(cli):
    cli.answer(201, PUBLISHED)
    result = cli.run("replace", "s", "user/7", '{"n": 1.10}', "--delay", "30m", "--header", "x=y")
    assert result.exit_code == 0, result.output
    document = {"body": {"n": 1.1}, "delay": "30m", "headers": {"x": "y"}}
    assert cli.asked == ("PUT", "/v1/subjects/s/keys/user%2F7", document)
    assert b'"n": 1.10' in cli.requests[0].content
    cli.requests.clear()
    cli.answer(201, PUBLISHED)
    cli.run("replace", "s", "k", "null")
    assert cli.asked[2] == {"body": None}
    cli.requests.clear()
    cli.answer(201, PUBLISHED)
    cli.run("replace", "s", "k", "1", "--debounce", "5s", "--at-most", "60000", "--keep", "first")
    debounce = {"quiet": "5s", "at_most": 60_000, "keep": "first"}
    assert cli.asked[2] == {"body": 1, "debounce": debounce}
    result = cli.run("replace", "s", "k", "1", "--keep", "first")
    assert result.exit_code == 2 and "--debounce" in result.output
