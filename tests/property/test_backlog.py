"""What waits for one subscription, against a list of rows: nothing is lost, every rule kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayserver.delivery.backlog import Backlog, Instant
from delayserver.delivery.catch_up import Pace
from delayserver.delivery.deadlines import STEP_MS
from delayserver.delivery.lane import Room
from delayserver.schedule.wheel_rows import FiredRows, route_bits
from storage.rows import FLAG_OPTIONS, HOUR_MS
from tests.unit.fakes import HOUR, START_MS, seqs, subscription, wheel_rows
from tests.world.server import longest_wait_ms

NO_LIMIT = 1 << 40

definitions = st.fixed_dictionaries(
    {},
    optional={
        "rate": st.tuples(st.sampled_from([0.5, 20.0, 1000.0]), st.integers(1, 5)),
        "batch": st.tuples(st.integers(1, 4), st.sampled_from([0, 30])),
        "catch_up": st.tuples(
            st.sampled_from(["spread_ms", "drop_older_than_ms"]), st.sampled_from([10, 200])
        ),
    },
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.lists(st.integers(0, 300), min_size=1, max_size=5)),
        st.tuples(st.just("pass"), st.integers(0, 80)),
        st.tuples(st.just("pop"), st.integers(1, 6)),
        st.tuples(st.just("drop"), st.integers(1, 6)),
        st.tuples(st.just("send"), st.integers(1, 6)),
        st.tuples(st.just("put back"), st.just(0)),
        st.tuples(st.just("come back"), st.just(0)),
        st.tuples(st.just("pause and resume"), st.just(0)),
        st.tuples(st.just("set the clock"), st.sampled_from((-HOUR_MS, -20, 20, HOUR_MS))),
    ),
    max_size=40,
)


class Time:
    """The clock, and the stopwatch beside it."""

    def __init__(self, now_ms: int) -> None:
        self.now_ms = now_ms
        self.passed_ms = 0

    @property
    def instant(self) -> Instant:
        return Instant(self.now_ms, self.passed_ms)

    def go_on(self, by_ms: int) -> None:
        self.now_ms += by_ms
        self.passed_ms += by_ms


def spend(backlog: Backlog, count: int, time: Time) -> None:
    """So many rows that left are sent now."""
    if backlog.rate is not None:
        backlog.rate.spend(count, time.passed_ms / 1000)


def define(chosen: dict[str, Any], **more: Any) -> Any:
    values: dict[str, Any] = dict(more)
    if "rate" in chosen:
        values["rate_per_s"], values["rate_burst"] = chosen["rate"]
    if "batch" in chosen:
        values["batch_max"], values["linger_ms"] = chosen["batch"]
    if "catch_up" in chosen:
        values[chosen["catch_up"][0]] = chosen["catch_up"][1]
    return subscription(type="webhook", **values)


@given(chosen=definitions, history=steps, behind=st.integers(0, 200))
def test_rows_leave_once_and_as_the_definition_allows(
    chosen: dict[str, Any], history: list[tuple[str, Any]], behind: int
) -> None:
    definition = define(chosen)
    time = Time(START_MS + 300)
    backlog = Backlog(definition, START_MS + behind)
    waiting: dict[int, int] = {}
    out: list[FiredRows] = []
    """Rows that left, one each, and were not sent yet."""
    sent: list[FiredRows] = []
    next_seq, count_sent, was_set = 1, 0, False
    in_time: set[int] = set()
    """Those that were sent once."""

    def due_ms(batch: FiredRows) -> list[int]:
        return [batch.hour * HOUR_MS + offset for offset in batch.rows["due_offset_ms"].tolist()]

    for name, value in history:
        if name == "push":
            rows = [(next_seq + n, START_MS + offset) for n, offset in enumerate(sorted(value))]
            next_seq += len(rows)
            waiting.update(rows)
            backlog.push(FiredRows(HOUR, wheel_rows(HOUR, *rows)))
        elif name == "pass":
            time.go_on(value)
        elif name == "set the clock":
            time.now_ms += value
            was_set = True
        elif name == "pop":
            now_ms = time.now_ms
            ready = backlog.ready(time.instant)
            oldest_ms = min(waiting.values(), default=0)
            taken = backlog.pop(value, NO_LIMIT, time.instant)
            count = len(seqs(taken))
            assert count <= min(ready, value)
            if not definition.drop_older_than_ms:
                assert count == min(ready, value)
            for batch in taken:
                for seq, due in zip(seqs([batch]), due_ms(batch), strict=True):
                    assert waiting.pop(seq) == due
                    if definition.drop_older_than_ms and seq not in in_time:
                        assert due >= now_ms - definition.drop_older_than_ms
            if count and definition.batch_max and count < min(value, definition.batch_max):
                limited = definition.rate_per_s or definition.spread_ms
                assert (
                    limited
                    or definition.drop_older_than_ms
                    or was_set
                    or (now_ms >= oldest_ms + definition.linger_ms)
                )
            out += each(taken)
        elif name == "drop":
            now_ms = time.now_ms
            for batch in backlog.pop_outdated(value, NO_LIMIT, now_ms):
                for seq, due in zip(seqs([batch]), due_ms(batch), strict=True):
                    assert waiting.pop(seq) == due
                    assert due < now_ms - definition.drop_older_than_ms
                    assert definition.drop_older_than_ms
                    assert seq not in in_time
        elif name == "send" and out:
            sending, out = out[:value], out[value:]
            spend(backlog, len(sending), time)
            count_sent += len(sending)
            in_time.update(seqs(sending))
            sent += sending
        elif name == "put back":
            if backlog.rate is not None:
                backlog.rate.release(len(out), time.passed_ms / 1000)
            for batch in out:
                backlog.put_back(batch)
                waiting.update(zip(seqs([batch]), due_ms(batch), strict=True))
            out = []
        elif name == "come back":
            for batch in sent:
                backlog.come_back(batch)
                waiting.update(zip(seqs([batch]), due_ms(batch), strict=True))
            sent = []
        elif name == "pause and resume":
            paused = define(chosen, paused=True)
            backlog.change(definition, paused, time.now_ms)
            backlog.change(paused, definition, time.now_ms)
        assert backlog.count == len(waiting)
        assert sorted(seqs(backlog.slices())) == sorted(waiting)
        if definition.rate_per_s:
            earned = definition.rate_per_s * time.passed_ms / 1000
            assert count_sent <= definition.rate_burst + earned + 1e-6
        ready = backlog.ready(time.instant)
        if (wait_ms := backlog.wait_ms(time.instant)) is not None:
            assert 0 < wait_ms <= longest_wait_ms(definition)
        if (outdated_ms := backlog.outdated_ms(time.now_ms)) is not None:
            assert outdated_ms > time.now_ms
        if waiting and not ready and not definition.drop_older_than_ms:
            # Or the next one leaves once another is sent.
            assert wait_ms is not None or (definition.rate_per_s and out)
    spend(backlog, len(out), time)
    # Everything leaves in the end, at the moments that it says itself.
    for _ in range(1000):
        if not waiting:
            break
        popped = backlog.pop(100, NO_LIMIT, time.instant)
        spend(backlog, len(seqs(popped)), time)
        leaving = [*backlog.pop_outdated(100, NO_LIMIT, time.now_ms), *popped]
        for seq in seqs(leaving):
            del waiting[seq]
        if waiting and not leaving:
            time.go_on(next_ms(backlog, time.instant))
    assert not waiting


def each(slices: list[FiredRows]) -> list[FiredRows]:
    """Each row by itself."""
    return [
        FiredRows(fired.hour, fired.rows[at : at + 1])
        for fired in slices
        for at in range(len(fired.rows))
    ]


def next_ms(backlog: Backlog, instant: Instant) -> int:
    """How long until the next row leaves, or is too old."""
    waits = [backlog.wait_ms(instant)]
    if (outdated_ms := backlog.outdated_ms(instant.now_ms)) is not None:
        waits.append(outdated_ms - instant.now_ms)
    return min(wait_ms for wait_ms in waits if wait_ms is not None)


@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=30),
    cuts=st.sets(st.integers(1, 29)),
    takes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 100)), min_size=30, max_size=30),
)
def test_what_leaves_together_is_no_longer_than_allowed_or_one_row(
    lengths: list[int], cuts: set[int], takes: list[tuple[int, int]]
) -> None:
    backlog = Backlog(subscription(), 0)
    rows = wheel_rows(HOUR, *((seq, START_MS + seq) for seq in range(len(lengths))))
    rows["locator"] = lengths
    for piece in np.split(rows, sorted(cut for cut in cuts if cut < len(rows))):
        backlog.push(FiredRows(HOUR, piece))
    left: list[int] = []
    for rows_max, bytes_max in takes:
        here = seqs(backlog.pop(rows_max, bytes_max, Instant(START_MS + 99, 0)))
        total_bytes = sum(lengths[seq] for seq in here)
        assert total_bytes <= bytes_max or len(here) == 1
        left += here
        if len(left) == len(lengths):
            break
        # No more would have fitted.
        assert len(here) == rows_max or total_bytes + lengths[left[-1] + 1] > bytes_max
    assert left == list(range(len(lengths)))
    assert backlog.count == 0


@given(
    over_ms=st.integers(1, 10_000),
    adds=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 50)), max_size=20),
)
def test_a_pace_lets_no_more_leave_than_the_share_of_the_time_that_is_over(
    over_ms: int, adds: list[tuple[int, int]]
) -> None:
    pace, now_ms, total, left = Pace(over_ms, 0), 0, 0, 0
    for passed_ms, count in adds:
        now_ms += passed_ms
        pace.add(count)
        total += count
        allowance = pace.allowance(now_ms)
        assert allowance >= min(1, total - left) or left
        pace.spend(max(0, allowance))
        left += max(0, allowance)
        assert left <= total
        assert left <= total * now_ms / over_ms + 1
        if left < total:
            next_ms = pace.next_ms(now_ms)
            assert next_ms > now_ms
            assert pace.allowance(next_ms) > 0 >= pace.allowance(next_ms - 1)
    assert pace.allowance(over_ms + now_ms) == total - left


def test_four_rows_over_ten_seconds() -> None:
    pace = Pace(10_000, 5_000)
    pace.add(4)
    now_ms = 5_000
    times: list[int] = []
    while len(times) < 4:
        if pace.allowance(now_ms):
            pace.spend(1)
            times.append(now_ms - 5_000)
        else:
            now_ms = pace.next_ms(now_ms)
    assert times == [0, 2_500, 5_000, 7_500]


def test_what_is_new_is_on_time_beside_what_is_spread() -> None:
    time = Time(START_MS + 100)
    backlog = Backlog(subscription(spread_ms=10_000), START_MS + 100)
    late = [(seq, START_MS + seq) for seq in range(1, 101)]
    backlog.push(FiredRows(HOUR, wheel_rows(HOUR, *late[:99])))
    assert backlog.ready(time.instant) == 1  # now the time begins
    time.go_on(1_000)
    assert seqs(backlog.pop(50, NO_LIMIT, time.instant)) == list(range(1, 11))
    assert backlog.wait_ms(time.instant) is not None
    backlog.push(FiredRows(HOUR, wheel_rows(HOUR, (500, START_MS + 1_100))))
    assert seqs(backlog.pop(50, NO_LIMIT, time.instant)) == [500]
    assert backlog.ready(time.instant) == 0


@pytest.mark.parametrize("count", [99, 100])
def test_a_batch_waits_for_others_only_so_long(count: int) -> None:
    time = Time(START_MS + 6)
    definition = subscription(type="webhook", batch_max=100, linger_ms=20)
    backlog = Backlog(definition, START_MS)
    rows = [(seq, START_MS + 5) for seq in range(1, count + 1)]
    backlog.push(FiredRows(HOUR, wheel_rows(HOUR, *rows)))
    assert backlog.ready(time.instant) == (100 if count == 100 else 0)
    if count < 100:
        assert backlog.wait_ms(time.instant) == 19
        time.go_on(19)
        assert backlog.ready(time.instant) == 99


def test_what_fell_due_in_a_pause_is_behind_when_it_ends() -> None:
    definition, paused = subscription(spread_ms=1_000), subscription(spread_ms=1_000, paused=True)
    backlog = Backlog(definition, 0)
    backlog.push(FiredRows(HOUR, wheel_rows(HOUR, (1, START_MS), (2, START_MS + 1))))
    assert backlog.ready(Instant(START_MS + 1, 0)) == 2
    later = Instant(START_MS + 500, 499)
    backlog.change(definition, paused, START_MS + 2)
    backlog.change(paused, definition, START_MS + 500)
    assert backlog.ready(later) == 1
    backlog.push(FiredRows(HOUR, wheel_rows(HOUR, (3, START_MS + 499), (4, START_MS + 500))))
    assert seqs(backlog.pop(9, NO_LIMIT, later)) == [4, 1]
    assert backlog.wait_ms(later) == 334


@pytest.mark.parametrize("rows_max", [1, 2, 3, 4, 5, 9])
def test_rows_leave_in_order_and_in_pieces(rows_max: int) -> None:
    backlog = Backlog(subscription(), 0)
    backlog.push(FiredRows(HOUR, wheel_rows(HOUR, (3, START_MS), (4, START_MS))))
    backlog.push(FiredRows(HOUR + 1, wheel_rows(HOUR + 1, (5, START_MS + HOUR_MS))))
    backlog.come_back(FiredRows(HOUR, wheel_rows(HOUR, (1, START_MS), (2, START_MS))))
    popped: list[int] = []
    while backlog.count:
        batches = backlog.pop(rows_max, NO_LIMIT, Instant(START_MS, 0))
        here = seqs(batches)
        assert 0 < len(here) <= rows_max
        assert all(batch.hour == HOUR + (5 in seqs([batch])) for batch in batches)
        popped += here
    assert popped == [1, 2, 3, 4, 5]
    assert backlog.pop(rows_max, NO_LIMIT, Instant(START_MS, 0)) == []


@given(
    ttls=st.lists(st.tuples(st.integers(1, 400), st.integers(0, 9)), min_size=1, max_size=30),
    looks=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 9)), min_size=1, max_size=12),
)
def test_what_waits_is_given_up_once_it_has_expired_and_nothing_else_is(
    ttls: list[tuple[int, int]], looks: list[tuple[int, int]]
) -> None:
    backlog = Backlog(subscription(), 0)
    expires = {seq: START_MS + ttl_ms for seq, (ttl_ms, _) in enumerate(ttls, 1)}
    for seq, (_, priority) in enumerate(ttls, 1):
        rows = wheel_rows(HOUR, (seq, START_MS), route=1 | route_bits(FLAG_OPTIONS | priority << 4))
        backlog.push(FiredRows(HOUR, rows))
    assert backlog.deadlines is not None
    unread = seqs(backlog.deadlines.next_unread(Room(99, NO_LIMIT)))
    assert unread == list(expires)
    moments = np.array([expires[seq] for seq in unread], np.int64)
    backlog.deadlines.add(np.array(unread, np.uint64), moments)
    now_ms, waiting = START_MS, set(unread)
    for by_ms, most in looks:
        now_ms += by_ms
        left = seqs(backlog.pop(1, NO_LIMIT, Instant(now_ms, 0)))
        waiting -= set(left)
        while taken := seqs(backlog.pop_expired(most, NO_LIMIT, now_ms)):
            assert len(taken) <= most
            assert all(expires[seq] <= now_ms for seq in taken)
            waiting -= set(taken)
        assert set(seqs(backlog.slices())) == waiting
        assert all(expires[seq] > now_ms - STEP_MS for seq in waiting)
