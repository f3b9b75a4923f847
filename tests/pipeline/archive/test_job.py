"""The job of an archive: its calls go page by page, and its results are added up."""

from typing import Any

import pytest

from delayserver.pipeline.archive.job import ArchiveCalls, ArchiveRun, HourFate, HourReport
from storage.buckets import parse_hour

FIRST, SECOND = "2026-11-20T15", "2026-11-20T16"


def listed(hour: str) -> dict[str, object]:
    return {"hour": hour, "schedule_bytes": 10, "dispatch_bytes": 5, "last_seq": 7, "count": 2}


def test_hours_that_wait_are_asked_for_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [
        {"archive": True, "hours": [listed(FIRST)], "cursor": "c"},
        {"archive": True, "hours": [listed(SECOND)], "cursor": None},
    ]
    asked: list[tuple[Any, ...]] = []

    def call(self: ArchiveCalls, *arguments: Any) -> Any:
        asked.append(arguments)
        return pages[len(asked) - 1] if arguments[0] == "GET" else None

    monkeypatch.setattr(ArchiveCalls, "call", call)
    calls = ArchiveCalls("http://127.0.0.1:9", shard=3)
    is_kept, hours = calls.waiting()
    assert is_kept and [one.hour for one in hours] == [parse_hour(FIRST), parse_hour(SECOND)]
    assert asked[1][1].endswith("&cursor=c&shard=3") and "cursor" not in asked[0][1]
    calls.confirm(hours[1], "sum", "there")
    method, path, document, _ = asked[2]
    assert (method, path) == ("PUT", f"/v1/archives/{SECOND}?shard=3")
    assert document["count"] == 2 and document["last_seq"] == 7
    assert (document["checksum"], document["location"]) == ("sum", "there")


@pytest.mark.parametrize("fate", HourFate)
def test_a_run_is_clean_unless_an_hour_is_damaged_or_different(fate: HourFate) -> None:
    run = ArchiveRun("to", is_kept=True)
    run.hours += [HourReport(FIRST, fate, 2), HourReport(SECOND, HourFate.ARCHIVED, 2)]
    assert run.is_clean is (fate not in (HourFate.DAMAGED, HourFate.DIFFERENT))
    assert run.total(fate) == 1 + (fate is HourFate.ARCHIVED)
    assert run.document()["hours"][0]["fate"] == fate.value
