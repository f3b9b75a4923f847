"""Failing: since when, when that is recorded, and when it has been for long enough."""

from __future__ import annotations

import msgspec
import pytest

from delayserver.decisions.failing import Consequence, Failing
from tests.unit.fakes import START_MS, subscription

HOOK = subscription(3, type="webhook", disable_after_ms=1000)


def test_it_is_recorded_after_a_tenth_and_paused_after_all_of_it() -> None:
    failing = Failing()
    assert failing.failed(HOOK, START_MS) is Consequence.NOTHING
    assert failing.failed(HOOK, START_MS + 99) is Consequence.NOTHING
    assert failing.failed(HOOK, START_MS + 100) is Consequence.RECORD
    assert failing.since_ms(HOOK.id) == START_MS
    recorded = msgspec.structs.replace(HOOK, failing_since_ms=START_MS)
    assert failing.failed(recorded, START_MS + 999) is Consequence.NOTHING
    assert failing.failed(recorded, START_MS + 1000) is Consequence.PAUSE


def test_whatever_arrives_ends_it() -> None:
    failing = Failing()
    failing.failed(HOOK, START_MS)
    assert failing.arrived(HOOK, START_MS + 50) is Consequence.NOTHING
    assert failing.since_ms(HOOK.id) == 0
    assert failing.failed(HOOK, START_MS + 5000) is Consequence.NOTHING


def test_a_restart_goes_on_counting_and_takes_back_what_was_recorded() -> None:
    recorded = msgspec.structs.replace(HOOK, failing_since_ms=START_MS)
    assert Failing().failed(recorded, START_MS + 1000) is Consequence.PAUSE
    assert Failing().arrived(recorded, START_MS + 1000) is Consequence.RECORD


@pytest.mark.parametrize("now_ms", [START_MS, START_MS + 10**12])
def test_who_does_not_ask_for_it_is_never_paused(now_ms: int) -> None:
    failing = Failing()
    hook = subscription(3, type="webhook")
    failing.failed(hook, START_MS)
    assert failing.failed(hook, now_ms) is Consequence.NOTHING
    assert list(failing) == [(hook.id, START_MS)]
    failing.arrived(hook, now_ms)
    assert list(failing) == []


def test_a_clock_that_was_set_back_pauses_nobody() -> None:
    failing = Failing()
    failing.failed(HOOK, START_MS)
    assert failing.failed(HOOK, START_MS - 10**9) is Consequence.NOTHING


def test_beside_other_shards_it_is_recorded_before_it_pauses() -> None:
    """Two failures with days between say nothing of what others have delivered meanwhile."""
    failing = Failing()
    failing.is_alone = False
    failing.failed(HOOK, START_MS)
    assert failing.failed(HOOK, START_MS + 5000) is Consequence.RECORD
    recorded = msgspec.structs.replace(HOOK, failing_since_ms=START_MS)
    assert failing.failed(recorded, START_MS + 5001) is Consequence.PAUSE


def test_a_shard_objects_to_what_others_say_of_a_time_in_which_something_arrived_here() -> None:
    failing = Failing()
    failing.arrived(HOOK, START_MS + 10)
    for since_ms, objects in ((0, False), (START_MS, True), (START_MS + 11, False)):
        told = msgspec.structs.replace(HOOK, failing_since_ms=since_ms)
        assert failing.objects(told) is objects
    # Until they have heard of that, it counts for itself.
    told = msgspec.structs.replace(HOOK, failing_since_ms=START_MS)
    assert failing.failed(told, START_MS + 5000) is Consequence.NOTHING
    failing.remove(HOOK.id)
    assert not failing.objects(told)
