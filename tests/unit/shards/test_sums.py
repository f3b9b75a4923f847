"""Counts of several shards as those of one server."""

from __future__ import annotations

import msgspec

from delayserver.api.documents import backup_document
from delayserver.backup.shelf import BackupView
from delayserver.shards.sums import (
    STATS,
    add_backup,
    add_backups,
    add_by_name,
    add_forecasts,
    add_stats,
    add_waiting,
)
from delayserver.wire.bulk import BackupDocument, BackupState, BackupStep
from delayserver.wire.operations import (
    FailingDocument,
    ForecastBucketDocument,
    ForecastDocument,
    LatenessDocument,
    StatsDocument,
)

NUMBERS = [
    name
    for name in StatsDocument.__struct_fields__
    if name not in ("version", "started_at", "oldest_due_at", "lateness", "failing")
]


def stats(number: int, started_at: str, oldest_due_at: str | None) -> StatsDocument:
    counts = {name: number * (n + 1) for n, name in enumerate(NUMBERS)}
    return StatsDocument(
        version=f"1.{number}",
        started_at=started_at,
        oldest_due_at=oldest_due_at,
        lateness=LatenessDocument([1.0, 2.0], [number, 0, 10 * number]),
        failing=[FailingDocument("both", f"t{number}"), FailingDocument(f"of-{number}", "t3")],
        **counts,
    )


def test_every_field_has_a_rule() -> None:
    assert set(STATS) == set(StatsDocument.__struct_fields__)


def test_stats() -> None:
    added = add_stats(
        [
            stats(2, "2026-11-20T16:30:00.000Z", None),
            stats(1, "2026-11-21T16:30:00.000Z", "2026-11-21T17:00:00.001Z"),
            stats(4, "2026-11-19T16:30:00.000Z", "2026-11-21T17:00:00.000Z"),
        ]
    )
    assert added.version == "1.2"
    assert added.started_at == "2026-11-21T16:30:00.000Z"
    assert added.oldest_due_at == "2026-11-21T17:00:00.000Z"
    one = stats(1, "", None)
    assert added.lateness == LatenessDocument([1.0, 2.0], [7, 0, 70])
    assert [(one.subscription, one.since) for one in added.failing] == [
        ("both", "t1"),
        *((f"of-{number}", "t3") for number in (1, 2, 4)),
    ]
    most = dict.fromkeys(("subjects", "subscriptions", "paused", "replay_lag_ms"), 4)
    factors = most | {"disk_free_bytes": 1}
    for name in NUMBERS:
        assert getattr(added, name) == getattr(one, name) * factors.get(name, 7), name


def test_nothing_is_queued_anywhere() -> None:
    assert add_stats([stats(1, "", None), stats(1, "", None)]).oldest_due_at is None


def forecast(**counts: int) -> ForecastDocument:
    return ForecastDocument("1h", [ForecastBucketDocument(*one) for one in counts.items()])


def test_forecast() -> None:
    added = add_forecasts([forecast(b=1, d=2), forecast(), forecast(a=3, b=4)])
    assert added == forecast(a=3, b=5, d=2)


def test_a_subscription_stays_as_it_is_written_but_for_what_waits() -> None:
    text = b'{"name":"a","queued":1,"rate":{"per_second": 1.50},"in_flight":20,"x":"\\u00e9"}'
    read = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
    added = add_waiting(read(text), [read(b'{"queued":4,"in_flight":0}')])
    assert msgspec.json.encode(added) == text.replace(b'"queued":1', b'"queued":5')
    assert msgspec.json.encode(add_waiting(read(text), [])) == text


def backup(
    shard: int,
    state: BackupState = "complete",
    step: BackupStep | None = None,
    *,
    name: str = "one",
    began_ms: int = 1000,
    is_verified: bool = True,
    log_reaches_ms: int | None = None,
) -> BackupDocument:
    is_complete = state == "complete"
    return backup_document(
        BackupView(
            name=name,
            shard=shard,
            state=state,
            step=step,
            began_ms=began_ms,
            taken_ms=2000 + shard if is_complete else None,
            completed_ms=None if state == "running" else 3000 + shard,
            checkpoint_seq=7 + shard if is_complete else None,
            total_bytes=100,
            done_bytes=50,
            copied_bytes=20,
            is_verified=is_verified,
            error="the disk is full" if state == "failed" else None,
            log_reaches_ms=log_reaches_ms,
        )
    )


def test_a_backup_is_complete_when_each_shard_has_its_part() -> None:
    whole = add_backup({0: backup(0), 1: backup(1, began_ms=900)})
    assert (whole.state, whole.verified, whole.error) == ("complete", True, None)
    assert (whole.total_bytes, whole.done_bytes, whole.copied_bytes) == (200, 100, 40)
    assert whole.started_at == "1970-01-01T00:00:00.900Z"
    assert whole.taken_at == "1970-01-01T00:00:02.001Z"
    assert [(one.shard, one.checkpoint_seq) for one in whole.shards] == [(0, 7), (1, 8)]
    assert not add_backup({0: backup(0), 1: backup(1, is_verified=False)}).verified

    reach = add_backup({n: backup(n, log_reaches_ms=9000 - n) for n in (0, 1)}).log_reaches_at
    assert reach == "1970-01-01T00:00:08.999Z"
    # Without the log of one of them it is nothing for all.
    assert add_backup({0: backup(0, log_reaches_ms=1), 1: backup(1)}).log_reaches_at is None

    under_way = add_backup({0: backup(0), 1: backup(1, "running", "waiting")})
    assert (under_way.state, under_way.step) == ("running", "waiting")
    assert (under_way.taken_at, under_way.completed_at, under_way.verified) == (None, None, False)

    failed = add_backup({0: backup(0), 1: backup(1, "failed"), 2: backup(2, "running", "copying")})
    assert (failed.state, failed.error) == ("failed", "shard 1: the disk is full")

    missing = add_backup({0: backup(0), 1: None})
    assert missing.state == "failed" and missing.error is not None and "shard 1" in missing.error


def test_backups_of_all_shards_are_put_together_by_name() -> None:
    found = add_backups(
        {
            0: [backup(0, name=name) for name in ("lost", "b", "a")],
            1: [backup(1, name=name, began_ms=began_ms) for name, began_ms in (("b", 9), ("a", 5))],
        }
    )
    assert [(one.name, one.state) for one in found] == [
        ("lost", "failed"),
        ("b", "complete"),
        ("a", "complete"),
    ]


def test_a_subscription_fails_since_the_earliest_failure_in_a_shard() -> None:
    read = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
    own = b'{"queued":0,"in_flight":0,"failing_since":null}'
    later = b'{"queued":0,"in_flight":0,"failing_since":"2026-11-21T00:00:00.000Z"}'
    added = add_waiting(read(own), [read(later), read(later.replace(b"21T", b"20T")), read(own)])
    assert bytes(added["failing_since"]) == b'"2026-11-20T00:00:00.000Z"'
    assert bytes(add_waiting(read(own), [read(own)])["failing_since"]) == b"null"


def test_rows_with_names_are_added_up() -> None:
    pages = [
        [{"name": "b", "n": 1, "m": 0}],
        [],
        [{"name": "a", "n": 2, "m": 5}, {"name": "b", "n": 3, "m": 4}],
    ]
    assert add_by_name(pages) == {
        "b": {"name": "b", "n": 4, "m": 4},
        "a": {"name": "a", "n": 2, "m": 5},
    }
