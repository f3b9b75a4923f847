"""schedules: what is asked, what is shown."""

from typing import Any

import pytest

VIEW: dict[str, Any] = {
    "name": "daily",
    "subject": "report",
    "cron": "@daily",
    "every": None,
    "timezone": "UTC",
}
VIEW |= {"next_at": ["2026-11-21T00:00:00.000Z", "2026-11-22T00:00:00.000Z"], "runs": 3}
VIEW |= {"paused": False}


def test_a_schedule_is_put(cli):
    cli.answer(201, VIEW)
    result = cli.run(
        *("schedules", "put", "daily", "report", '{"n": 1.50}', "--cron", "@daily"),
        *("--timezone", "Europe/Berlin", "--header", "x-shop=7", "--jitter", "30s"),
        *("--catch-up", "none", "--overlap", "skip", "--start", "2026-11-20T00:00:00Z"),
        *("--end", "1795219200000", "--max-runs", "9"),
    )
    assert result.exit_code == 0, result.output
    assert cli.asked == (
        "PUT",
        "/v1/schedules/daily",
        {
            "subject": "report",
            "cron": "@daily",
            "timezone": "Europe/Berlin",
            "start_at": "2026-11-20T00:00:00Z",
            "end_at": 1795219200000,
            "max_runs": 9,
            "headers": {"x-shop": "7"},
            "jitter": "30s",
            "catch_up": "none",
            "overlap": "skip",
            "body": {"n": 1.5},
        },
    )
    assert "2026-11-21T00:00:00.000Z" in result.stdout


def test_schedules_are_listed_with_their_next_times(cli):
    cli.answer(200, {"schedules": [VIEW], "cursor": None})
    result = cli.run("schedules")
    assert result.exit_code == 0, result.output
    assert cli.asked == ("GET", "/v1/schedules?limit=100", None)
    assert "2026-11-21" in result.stdout and "2026-11-22" not in result.stdout


def test_it_is_said_that_there_are_none(cli):
    cli.answer(200, {"schedules": [], "cursor": None})
    assert "There are no schedules" in cli.run("schedules", "list", "--limit", "7").stdout
    assert cli.asked[1] == "/v1/schedules?limit=7"


def test_a_preview_is_one_time_a_line(cli):
    cli.answer(200, {"next_at": VIEW["next_at"]})
    result = cli.run("schedules", "preview", "--every", "30s", "--count", "2")
    assert cli.asked == (
        "POST",
        "/v1/schedules/preview?count=2",
        {"subject": "preview", "every": "30s"},
    )
    assert result.stdout.splitlines() == VIEW["next_at"]


@pytest.mark.parametrize(
    ("command", "method", "path", "status"),
    [
        ("show", "GET", "", 200),
        ("pause", "POST", "/pause", 200),
        ("resume", "POST", "/resume", 200),
        ("trigger", "POST", "/trigger", 201),
        ("delete", "DELETE", "", 204),
    ],
)
def test_a_schedule_is_looked_at_and_changed(cli, command, method, path, status):
    cli.answer(status, VIEW)
    result = cli.run("schedules", command, "daily")
    assert result.exit_code == 0, result.output
    assert cli.asked == (method, f"/v1/schedules/daily{path}", None)
    assert "daily" in result.stdout


@pytest.mark.parametrize("options", [[], ["--cron", "@daily", "--every", "1h"], ["--every", "x"]])
def test_what_the_command_line_sees_by_itself_is_refused(cli, options):
    result = cli.run("schedules", "put", "daily", "report", "1", *options)
    assert result.exit_code == 2
