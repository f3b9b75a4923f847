"""The forecast: what falls due when."""

import json
import re
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from delayserver.pipeline.progress import Job
from delayserver.pipeline.reports import forecast_report
from delayserver.pipeline.reports.forecast import (
    DAY_MS,
    MINUTE_MS,
    Forecast,
    forecast,
    memory_bytes,
)
from delayserver.times import format_time
from storage.rows import HOUR_MS
from tests.pipeline.store import START_MS, Store


@pytest.fixture(scope="module")
def found(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Forecast:
    """Without a subscription; one message is overdue, one cancelled, one beyond the days."""
    store = Store(tmp_path_factory.mktemp("forecast"))
    seqs = store.publish("a", [500, 2 * HOUR_MS, 2 * HOUR_MS + 1, 2 * HOUR_MS + MINUTE_MS])
    store.publish("b", [2 * HOUR_MS + 2, 9 * DAY_MS])
    store.cancel(seqs[2], 2 * HOUR_MS + 1)
    store.run(10_000)
    store.kill()
    return forecast(Job(spark), store.root, days=7, now_ms=store.clock.now_ms)


def test_what_waits_is_counted_by_minute_hour_and_subject(found: Forecast) -> None:
    assert (found.waiting, found.overdue, found.damaged) == (4, 1, 0)
    start = START_MS + 2 * HOUR_MS
    assert found.minutes.values.tolist() == [[start, 2], [start + MINUTE_MS, 1]]
    assert found.hours[["hour_ms", "due"]].values.tolist() == [
        [start, 3],
        [START_MS + 9 * DAY_MS, 1],
    ]
    assert dict(zip(found.subjects["subject"], found.subjects["due"], strict=True)) == {
        "a": 2,
        "b": 2,
    }
    assert found.hot["due"].tolist() == [2, 1]


def test_memory_is_that_of_the_wheel(found: Forecast) -> None:
    assert found.hours["memory_bytes"].tolist() == [memory_bytes(3), memory_bytes(1)]
    assert memory_bytes(1_000_000) - memory_bytes(0) == 24_000_000


def test_the_page_and_the_document(found: Forecast) -> None:
    page = forecast_report.page(found)
    assert page.count("<svg") == 2
    assert not re.search(r"""(src|href)=["'](?!#)""", page)
    document = json.loads(json.dumps(forecast_report.document(found)))
    assert document["hot_minutes"][0] == {
        "from": format_time(START_MS + 2 * HOUR_MS),
        "due": 2,
    }
    assert document["overdue"] == 1


def test_nothing_waits(spark: SparkSession, tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.checkpoint()
    store.kill()
    found = forecast(Job(spark), store.root, now_ms=START_MS)
    assert (found.waiting, len(found.minutes), len(found.hours)) == (0, 0, 0)
    assert "Nothing waits." in forecast_report.page(found)
