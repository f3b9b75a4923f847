"""What is filed is read again and again, and what is damaged is found in the first round."""

from __future__ import annotations

import itertools

import pytest

from delayserver.recovery.scrub import Scrub
from storage.rows import LogKind
from tests.unit.recovery.test_incoming import Source


def scrub_of(source: Source, slice_bytes: int = 1) -> Scrub:
    store = source.server.store
    log = store.hour_log(LogKind.SCHEDULE)
    return Scrub(log, store.replay.hours, slice_bytes=slice_bytes)


def test_what_is_intact_is_read_in_turn() -> None:
    source = Source(6)
    scrub = scrub_of(source)
    seen = []
    for _ in range(40):
        assert scrub.step() == []
        seen.append(scrub._bucket)
    hours = sorted(bucket for bucket, one in source.server.replay.hours.items() if one.length)
    assert len(hours) > 2
    assert set(seen) == set(hours)
    changes = [after for before, after in itertools.pairwise(seen) if before != after]
    assert changes[: len(hours) - 1] == hours[1:], "one after the other"


def test_there_may_be_nothing_to_read() -> None:
    assert scrub_of(Source(0)).step() == []


@pytest.mark.unchecked
@pytest.mark.parametrize("at", [70, 200, -20])
@pytest.mark.parametrize("slice_bytes", [1, 1 << 20])
def test_damage_is_found(at: int, slice_bytes: int) -> None:
    source = Source(6)
    path = f"schedule/{source.disk.list('schedule')[1]}"
    file = source.disk.open(path)
    at %= file.size()
    file.pwrite([bytes([file.pread(1, at)[0] ^ 1])], at)
    scrub = scrub_of(source, slice_bytes)
    found = [damage for _ in range(40) for damage in scrub.step()]
    assert {damage.path for damage in found} == {path}
    assert not any(damage.torn for damage in found)


@pytest.mark.unchecked
def test_a_file_that_is_too_short_is_damaged() -> None:
    source = Source(6)
    path = f"schedule/{source.disk.list('schedule')[1]}"
    source.disk.open(path).truncate(0)
    scrub = scrub_of(source)
    found = [damage for _ in range(10) for damage in scrub.step()]
    assert {(damage.path, damage.offset) for damage in found} == {(path, 0)}


def test_an_hour_that_is_gone_is_passed_over() -> None:
    source = Source(6)
    scrub = scrub_of(source)
    scrub.step()
    first = scrub._bucket
    scrub._end = 0
    hours = source.server.replay.hours
    state = hours.pop(first)
    assert scrub.step() == []
    assert scrub._bucket != first
    hours[first] = state
