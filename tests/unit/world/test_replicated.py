"""The simulated log does to an append what its module says, and nothing else."""

import random
from collections import Counter

import pytest

from storage.replicated.envelope import Beat, decode
from tests.world.storage.replicated import LOG, Agenda, Sent, SimulatedLog, Uplink

APPENDS = 2000


def beat(number: int) -> Beat:
    return Beat(1, 1, number, 0, 0, 0)


def filled(*, is_idempotent: bool, is_calm: bool = False) -> tuple[SimulatedLog, list[Sent]]:
    """A log with many appends, each of a process of its own."""
    agenda = Agenda()
    log = SimulatedLog(random.Random(7), agenda, is_idempotent=is_idempotent)
    log.is_calm = is_calm
    all_sent = [Sent(beat(number), 0) for number in range(APPENDS)]
    for sent in all_sent:
        log.append(sent, Uplink())
    agenda.run(19_999, lambda: None)
    return log, all_sent


def clocks(log: SimulatedLog) -> list[int]:
    return [decode(data, LOG, offset).clock_ms for offset, data in log.read(0, 20_000)]


def test_a_calm_log_keeps_and_answers_everything() -> None:
    log, all_sent = filled(is_idempotent=False, is_calm=True)
    found = clocks(log)
    assert sorted(found) == list(range(APPENDS))
    assert [found[sent.offset] for sent in all_sent if sent.offset is not None] == [*range(APPENDS)]
    assert not log.counts


@pytest.mark.parametrize("is_idempotent", [True, False])
def test_answers_and_records_are_lost_and_repeated(is_idempotent: bool) -> None:
    log, all_sent = filled(is_idempotent=is_idempotent)
    times = Counter(clocks(log))
    assert min(log.counts[what] for what in ("lost", "late", "unanswered", "repeated")) > 0
    assert APPENDS - len(times) == log.counts["lost"]
    assert sum(sent.offset is None for sent in all_sent) == sum(
        log.counts[what] for what in ("lost", "unanswered")
    )
    twice = [number for number, count in times.items() if count == 2]
    assert len(twice) == (0 if is_idempotent else log.counts["repeated"])
    found = clocks(log)
    assert all(found[sent.offset] == sent.record.clock_ms for sent in all_sent if sent.offset)


def test_what_one_process_sends_comes_in_its_order_and_not_before_the_cut_ends() -> None:
    agenda = Agenda()
    log = SimulatedLog(random.Random(1), agenda, is_idempotent=False)
    log.is_calm = True
    uplink = Uplink(cut_until_ms=1000)
    for number in range(50):
        log.append(Sent(beat(number), 0), uplink)
    agenda.run(8999, lambda: None)
    assert clocks(log) == list(range(50))
    assert log.read(0, 1000) == []
    assert log.end == 50


def test_a_late_reader_sees_what_was_there_then() -> None:
    log, _ = filled(is_idempotent=True, is_calm=True)
    early = log.read(0, 5)
    assert 0 < len(early) < APPENDS
    assert log.read(len(early), 5) == []
    assert log.read(0, 20_000)[: len(early)] == early


def test_behind_a_lost_record_an_idempotent_producer_adds_nothing() -> None:
    agenda = Agenda()
    log = SimulatedLog(random.Random(1), agenda, is_idempotent=True)
    log.append(Sent(beat(1), 0), Uplink(has_lost=True))
    agenda.run(8999, lambda: None)
    assert log.end == 0
