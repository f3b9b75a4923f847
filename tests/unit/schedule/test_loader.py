"""The loader: what an hour's file holds, minus what was removed, minus what is settled."""

from __future__ import annotations

import numpy as np
import pytest

from delayserver.records.horizon import Mark
from delayserver.records.subscriptions import Registry
from delayserver.records.tables import number_key
from delayserver.schedule.loader import LoadedHour, LoadSizes
from delayserver.schedule.wheel_rows import ROUTE_SUBSCRIPTION
from storage.catalog import Table
from storage.frame import seal, unseal
from storage.rows import HOUR_MS, RecordKind
from tests.unit.fakes import (
    HOUR,
    START_MS,
    SUBJECT,
    Disk,
    Log,
    dispatch_row,
    place_of,
    rows_in,
    subscription,
)


def waiting(loaded: LoadedHour) -> list[int]:
    return rows_in(loaded)["seq"].tolist()


def routes(loaded: LoadedHour) -> set[tuple[int, int]]:
    """Seq and subscription of all rows that wait (0: all that match)."""
    result = set()
    for row in rows_in(loaded):
        route = int(row["route"])
        is_one = bool(route & ROUTE_SUBSCRIPTION)
        result.add((int(row["seq"]), route & ~ROUTE_SUBSCRIPTION if is_one else 0))
    return result


@pytest.fixture(params=[LoadSizes(), LoadSizes(1, 1, 0, 64), LoadSizes(2, 2, 100, 64)])
def disk(request: pytest.FixtureRequest) -> Disk:
    """An hour is the same in one part and in many, in memory and in files."""
    return Disk(load_sizes=request.param)


def test_rows_come_sorted_by_slot_with_the_place_of_their_payload(disk: Disk) -> None:
    log = Log()
    log.publish(START_MS + 2_000, body=b"late")
    log.publish(START_MS + 10, body=b"early")
    disk.file(log.close())
    log.publish(START_MS + 1_000, body=b"between")
    log.publish(START_MS + HOUR_MS, body=b"another hour")
    disk.file(log.close())
    [snapshot] = disk.replay.snapshot(HOUR)
    loaded = disk.load(snapshot)
    assert (loaded.hour, loaded.count, loaded.damage) == (HOUR, 3, [])
    assert waiting(loaded) == [2, 3, 1]
    assert rows_in(loaded)["due_offset_ms"].tolist() == [10, 1_000, 2_000]
    assert routes(loaded) == {(1, 0), (2, 0), (3, 0)}
    for row, text in zip(rows_in(loaded), (b"early", b"between", b"late"), strict=True):
        offset, length = place_of(int(row["locator"]))
        data = unseal(disk.schedule.read(HOUR, offset, length))
        assert data is not None
        assert text in data


def test_rows_that_were_filed_one_by_one_are_there_with_their_payloads(disk: Disk) -> None:
    log = Log()
    for number in range(60):
        if number % 3 == 2:
            log.cancel(number - 1, START_MS + number - 2)
        else:
            log.publish(START_MS + number, body=b"body %d" % (number + 1))
        disk.file(log.close())
        if number % 6 == 1:
            disk.settle(HOUR, dispatch_row(number + 1))
    [snapshot] = disk.replay.snapshot(HOUR)
    loaded = disk.load(snapshot, subscription(1))
    # Of three records the third cancels the first; of two that are left the first is delivered.
    assert waiting(loaded) == list(range(5, 60, 6))
    for row in rows_in(loaded):
        offset, length = place_of(int(row["locator"]))
        data = unseal(disk.schedule.read(HOUR, offset, length))
        assert data is not None
        assert b"body %d" % row["seq"] in data


def test_rows_are_found_by_their_seq_also_those_that_several_wait_for(disk: Disk) -> None:
    log = Log()
    for due_ms in (2_000, 10, 1_000, 10, 3_000):
        log.publish(START_MS + due_ms)
    disk.file(log.close())
    # Two of three subscriptions wait for the second message still.
    disk.settle(HOUR, dispatch_row(2, subscription_id=2))
    [snapshot] = disk.replay.snapshot(HOUR)
    loaded = disk.load(snapshot, *(subscription(number) for number in (1, 2, 3)))
    for wanted in ([], [1], [2, 5], [9, 2, 4, 0], [1, 2, 3, 4, 5]):
        found = loaded.find(np.array(wanted, np.uint64))
        assert len(set(found.tolist())) == len(found)
        expected = [seq for seq in waiting(loaded) if seq in wanted]
        assert sorted(loaded.rows(found)["seq"].tolist()) == sorted(expected)
    assert waiting(loaded).count(2) == 2
    loaded.remove(loaded.find(np.array([4, 2], np.uint64)))
    assert sorted(waiting(loaded)) == [0, 0, 0, 1, 3, 5]


def test_nothing_is_found_in_an_hour_of_which_all_is_settled(disk: Disk) -> None:
    log = Log()
    log.publish(START_MS)
    log.cancel(1, START_MS)
    disk.file(log.close())
    [snapshot] = disk.replay.snapshot(HOUR)
    assert not len(disk.load(snapshot).find(np.array([1], np.uint64)))


def test_what_was_filed_after_the_snapshot_is_not_loaded(disk: Disk) -> None:
    log = Log()
    log.publish(START_MS)
    disk.file(log.close())
    [snapshot] = disk.replay.snapshot(HOUR)
    log.publish(START_MS)
    disk.file(log.close())
    assert waiting(disk.load(snapshot)) == [1]


def test_cancelled_and_moved_rows_are_gone_in_whichever_frame_that_stands(disk: Disk) -> None:
    log = Log()
    for _ in range(4):
        log.publish(START_MS)
    log.cancel(1, START_MS)
    disk.file(log.close())
    log.cancel(2, START_MS)
    moved = log.move(3, START_MS, START_MS + 5)
    disk.file(log.close())
    [snapshot] = disk.replay.snapshot(HOUR)
    assert waiting(disk.load(snapshot)) == [4, moved]


def test_what_is_settled_does_not_come_back(disk: Disk) -> None:
    log = Log()
    log.publish(START_MS)
    log.publish(START_MS)
    disk.file(log.close())
    disk.settle(HOUR, dispatch_row(1))
    [snapshot] = disk.replay.snapshot(HOUR)
    assert waiting(disk.load(snapshot, subscription(1))) == [2]


def test_what_is_settled_for_some_remains_for_the_others(disk: Disk) -> None:
    log = Log()
    log.publish(START_MS)
    log.publish(START_MS)
    disk.file(log.close())
    disk.settle(HOUR, dispatch_row(1, subscription_id=2))
    [snapshot] = disk.replay.snapshot(HOUR)
    subscriptions = [
        subscription(1),
        subscription(2),
        subscription(3, subject="*"),
        subscription(4, created_ms=START_MS + 1),
        subscription(5, subject="other"),
    ]
    loaded = disk.load(snapshot, *subscriptions)
    assert routes(loaded) == {(2, 0), (1, 1), (1, 3)}


def test_what_a_deleted_subscription_left_behind_is_dropped_for_this_one_alone(disk: Disk) -> None:
    log = Log()
    log.publish(START_MS)
    log.publish(START_MS)
    retry = log.retry(2, START_MS, START_MS, subscription_id=1)
    disk.file(log.close())
    disk.settle(HOUR, dispatch_row(1, subscription_id=0))
    disk.settle(HOUR, dispatch_row(retry, subscription_id=0))
    [snapshot] = disk.replay.snapshot(HOUR)
    assert routes(disk.load(snapshot, subscription(2))) == {(1, 0), (2, 2)}
    assert routes(disk.load(snapshot)) == {(1, 0)}
    disk.settle(HOUR, dispatch_row(1, subscription_id=3))
    assert routes(disk.load(snapshot)) == set()


def test_what_others_had_is_not_for_who_came_when_the_clock_was_set_back(disk: Disk) -> None:
    log = Log()
    for _ in range(3):
        log.publish(START_MS + 50)
    disk.file(log.close())
    for seq in (1, 2, 3):
        disk.settle(HOUR, dispatch_row(seq, subscription_id=1, due_ms=START_MS + 50))
    [snapshot] = disk.replay.snapshot(HOUR)
    late = subscription(2, created_ms=START_MS, horizon=(Mark(2, START_MS + 51),))
    assert routes(disk.load(snapshot, subscription(1), late)) == {(3, 2)}


def test_it_tells_what_has_fired_though_it_is_not_due(disk: Disk) -> None:
    log = Log()
    for delay_ms in (10, 90, 50, 60, 70):
        log.publish(START_MS + delay_ms)
    log.retry(4, START_MS + 60, START_MS + 100, subscription_id=1)
    log.cancel(5, START_MS + 70)
    disk.file(log.close())
    disk.settle(HOUR, dispatch_row(1, due_ms=START_MS + 10))
    disk.settle(HOUR, dispatch_row(2, due_ms=START_MS + 90))
    disk.settle(HOUR, dispatch_row(3, due_ms=START_MS + 50))
    [snapshot] = disk.replay.snapshot(HOUR)

    def fired(now_ms: int) -> list[Mark]:
        registry, names = Registry([subscription(1)]), {1: SUBJECT}
        return disk.loader.load(snapshot, registry, names, now_ms=now_ms).fired

    # Row 3 is older than row 4, and was due before it.
    assert fired(START_MS) == [Mark(2, START_MS + 91), Mark(4, START_MS + 61)]
    assert fired(START_MS + 61) == [Mark(2, START_MS + 91)]
    assert fired(START_MS + 91) == []
    assert disk.load(snapshot, subscription(1)).fired == []


def test_a_retry_settles_the_delivery_it_follows_and_no_other(disk: Disk) -> None:
    log = Log()
    log.publish(START_MS)
    retry = log.retry(1, START_MS, START_MS + 100, subscription_id=1)
    disk.file(log.close())
    [snapshot] = disk.replay.snapshot(HOUR)
    subscriptions = [subscription(1), subscription(2)]
    assert routes(disk.load(snapshot, *subscriptions)) == {(1, 2), (retry, 1)}
    again = log.retry(retry, START_MS + 100, START_MS + 200, subscription_id=1)
    disk.file(log.close())
    disk.settle(HOUR, dispatch_row(1, subscription_id=2))
    snapshot = snapshot._replace(length=disk.schedule.size(HOUR))
    assert routes(disk.load(snapshot, *subscriptions)) == {(again, 1)}
    disk.settle(HOUR, dispatch_row(again, subscription_id=1))
    assert waiting(disk.load(snapshot, *subscriptions)) == []


def test_what_was_delivered_to_a_subscription_that_came_late_is_done(disk: Disk) -> None:
    log = Log()
    log.publish(START_MS)
    disk.file(log.close())
    disk.settle(HOUR, dispatch_row(1, subscription_id=1))
    [snapshot] = disk.replay.snapshot(HOUR)
    assert waiting(disk.load(snapshot, subscription(1, created_ms=START_MS + 1))) == []


def test_an_hour_that_was_deleted_and_began_again_is_read_anew(disk: Disk) -> None:
    log = Log()
    log.publish(START_MS)
    disk.file(log.close())
    disk.settle(HOUR, dispatch_row(1))
    [snapshot] = disk.replay.snapshot(HOUR)
    assert waiting(disk.load(snapshot, subscription(1))) == []
    del disk.replay.hours[HOUR]
    disk.replay.purging.delete_files(HOUR)
    log.publish(START_MS)
    log.publish(START_MS)
    disk.file(log.close())
    disk.replay.checkpoint()
    snapshot = snapshot._replace(length=disk.schedule.size(HOUR))
    assert waiting(disk.load(snapshot, subscription(1))) == [2, 3]


@pytest.mark.damaged("a frame of the schedule log")
def test_damage_is_named_and_the_healthy_rest_is_loaded(disk: Disk) -> None:
    log = Log()
    for _ in range(3):
        log.publish(START_MS)
        disk.file(log.close())
    [snapshot] = disk.replay.snapshot(HOUR)
    path = disk.schedule.path(HOUR)
    second = snapshot.length // 3
    disk.files.open(path).pwrite([b"\xff"], second + 70)
    loaded = disk.load(snapshot)
    assert waiting(loaded) == [1, 3]
    [damage] = loaded.damage
    assert (damage.path, damage.offset, damage.first_seq, damage.last_seq) == (path, second, 2, 2)


@pytest.mark.damaged("the end of a schedule file")
def test_a_file_that_is_shorter_than_the_catalog_says_is_damage(disk: Disk) -> None:
    log = Log()
    for _ in range(2):
        log.publish(START_MS)
        disk.file(log.close())
    [snapshot] = disk.replay.snapshot(HOUR)
    disk.schedule.cut(HOUR, snapshot.length // 2)
    loaded = disk.load(snapshot)
    assert waiting(loaded) == [1]
    [damage] = loaded.damage
    assert (damage.offset, damage.end) == (snapshot.length // 2, snapshot.length)
    assert "shorter" in damage.reason


@pytest.mark.damaged("a frame of the dispatch log")
def test_a_damaged_dispatch_log_is_named_and_a_torn_tail_is_not(disk: Disk) -> None:
    log = Log()
    for _ in range(3):
        log.publish(START_MS)
    disk.file(log.close())
    for seq in (1, 2):
        disk.settle(HOUR, dispatch_row(seq))
    [snapshot] = disk.replay.snapshot(HOUR)
    path = disk.dispatch.path(HOUR)
    file = disk.files.open(path)
    file.pwrite([b"torn"], disk.dispatch.size(HOUR))
    assert disk.load(snapshot, subscription(1)).damage == []
    file.pwrite([b"\xff"], 70)
    loaded = disk.load(snapshot, subscription(1))
    assert sorted(waiting(loaded)) == [1, 3]
    assert [damage.path for damage in loaded.damage] == [path]


def test_an_hour_of_several_subjects(disk: Disk) -> None:
    log = Log(subjects=[SUBJECT, "refund"])
    disk.names[2] = "refund"
    disk.replay.effects.writes[Table.SUBJECTS].append((number_key(2), b"refund"))
    log.publish(START_MS)
    log.sequencer.append(RecordKind.PUBLISH, due_ms=START_MS, subject_id=2, payload=seal(b"{}"))
    disk.file(log.close())
    disk.settle(HOUR, dispatch_row(1, subscription_id=1), dispatch_row(2, subscription_id=2))
    [snapshot] = disk.replay.snapshot(HOUR)
    both = [subscription(1), subscription(2, subject="refund"), subscription(3, subject="*")]
    assert routes(disk.load(snapshot, *both)) == {(1, 3), (2, 3)}
