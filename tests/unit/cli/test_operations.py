"""stats, subjects, forecast, shards, whoami, ready: what is asked, what is shown."""

import httpx


def test_stats_shows_every_figure(cli):
    cli.answer(200, {"accepted": 12345, "hours": {"loaded": 2}})
    stdout = cli.run("stats").stdout
    assert "12,345" in stdout
    assert "hours.loaded" in stdout


def test_forecast_counts_and_draws(cli):
    buckets = [
        {"from": "2026-11-20T16:00:00.000Z", "count": 4000},
        {"from": "2026-11-20T17:00:00.000Z", "count": 1},
    ]
    cli.answer(200, {"bucket": "1d", "buckets": buckets})
    stdout = cli.run("forecast", "--bucket", "1d").stdout
    assert cli.asked[:2] == ("GET", "/v1/forecast?bucket=1d")
    assert "4,000" in stdout
    assert [line.count("█") for line in stdout.splitlines()] == [0, 40, 1]
    cli.answer(200, {"bucket": "1h", "buckets": []})
    assert cli.run("forecast").stdout == "Nothing is pending.\n"


def test_subjects_are_listed_with_their_counts(cli):
    counts = {"accepted": 12345, "cancelled": 0, "delivered": 7, "retried": 0, "dead": 0}
    cli.answer(200, {"subjects": [{"name": "a", **counts}], "cursor": "a"})
    cli.answer(200, {"subjects": [{"name": "b", **counts}], "cursor": None})
    stdout = cli.run("subjects").stdout
    assert [request.url.raw_path for request in cli.requests] == [
        b"/v1/subjects?limit=100",
        b"/v1/subjects?limit=99&cursor=a",
    ]
    assert "12,345" in stdout and stdout.splitlines()[-1].startswith("b")


def test_whoami_shows_what_the_token_may(cli):
    own = {"name": "shop", "scopes": ["publish:order.*"], "expires_at": None, "rate": None}
    cli.answer(200, own)
    stdout = cli.run("whoami").stdout
    assert cli.asked == ("GET", "/v1/tokens/self", None)
    assert "shop" in stdout and "publish:order.*" in stdout


def test_ready(cli):
    cli.answer(200, {"status": "ready"})
    assert "is ready" in cli.run("ready").stdout
    assert cli.asked == ("GET", "/readyz", None)


def test_not_ready_yet(cli):
    cli.answer(503, {"title": "Too much at once", "status": 503, "detail": "stopping"})
    assert cli.run("ready").exit_code == 1
    cli.answers.append(httpx.ConnectError("refused"))
    assert cli.run("ready").exit_code == 3


def test_ready_waits(cli, monkeypatch):
    monkeypatch.setattr("delayserver.cli.operations.READY_POLL_S", 0)
    cli.answers.append(httpx.ConnectError("refused"))
    cli.answer(503, {"title": "Too much at once", "status": 503, "detail": "recovering"})
    cli.answer(200, {"status": "ready"})
    assert cli.run("ready", "--wait", "30s").exit_code == 0
    assert len(cli.requests) == 3
    assert cli.run("ready", "--wait", "soon").exit_code == 2


def test_shards_are_shown_with_where_they_are(cli):
    away = {"shard": 1, "state": "away", "owner": "local", "url": None}
    there = {"shard": 0, "state": "serving", "owner": "local", "url": "http://127.0.0.1:4000"}
    cli.answer(200, {"version": 7, "shards": [there, away], "nodes": []})
    lines = [line.split() for line in cli.run("shards").stdout.splitlines()]
    assert cli.asked[:2] == ("GET", "/v1/cluster")
    assert lines[1:3] == [
        ["0", "serving", "local", "http://127.0.0.1:4000"],
        ["1", "away", "local", "–"],
    ]
