"""Worlds with a seed: many lives of the real server, any interleaving, every promise checked.

`python -m tests.world --cycles 100000 --jobs 2` runs more of the same."""

from collections import Counter
from functools import cache

import pytest

from delayserver.decisions.new_messages import NewMessage
from delayserver.records.message import Payload
from storage.rows import HOUR_MS
from tests.depth import every, least, missing_max
from tests.world import World, run_world

WORLDS = 60
LONG_WORLDS = 6

ONCE_FAILED = (2, 3, 8, 18, 35, 57, 92, 298, 1049, 1207, 1349, 1483, 1795, 1958, 80001, 80122)
"""Seeds that once led to a bug. What they do changes with the code: they are a sample like any."""

HAPPENS = (
    "published",
    "cancelled",
    "moved",
    "acked",
    "retry",
    "dead",
    "redrive",
    "duplicates",
    "sent of a group again",
    "replaced",
    "sent",
    "events",
    "cancelled by an event",
    "fired by an event",
    "heartbeats fired",
    "renewals",
    "run",
    "triggered",
    "runs left out",
    "taken from topics",
    "records left out",
    "disk full",
    "power loss",
    "kill",
    "stops",
    "crashes inside a call",
    "ended by a failed disk",
    "clock jumps back",
)


@pytest.mark.parametrize("seed", every(4, ONCE_FAILED))
def test_seeds_that_once_failed(seed: int) -> None:
    run_world(seed)


@cache
def counts_of(number: int) -> Counter[str]:
    """What happened in one of the worlds."""
    world = run_world(10_000 + number)
    return world.counts + world.ledger.counts


@pytest.mark.parametrize("first", range(0, WORLDS, 20))
def test_no_world_breaks_a_promise(first: int) -> None:
    for number in every(4, range(first, first + 20)):
        counts_of(number)


def test_long_lives_break_no_promise() -> None:
    for seed in every(4, range(LONG_WORLDS)):
        run_world(20_000 + seed, lives=4, steps=500)


def test_a_replacement_that_is_not_durable_may_give_up_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ledger knows only the cancelled message, which would hold the key for an hour."""
    with World(0) as world:
        world.settings = world.settings.model_copy(update={"dedupe_window_ms": 0})
        world._start()
        server, clients, clock = world._running, world.clients, world.clock

        def next_is_due_in(delay_ms: int) -> None:
            payload = Payload(b"1", key="k1")
            message = NewMessage("misc", clock.now_ms + delay_ms, payload)
            monkeypatch.setattr(clients, "_new_message", lambda *_: message)

        def cancel_newest() -> int:
            seq = server.engine.sequencer.next_seq - 1
            server.engine.messages.cancel(seq, clients._new_message("misc", "k1").due_ms)
            return seq

        next_is_due_in(HOUR_MS)
        clients.publish()
        first = cancel_newest()
        server.rest()
        assert world.ledger.messages[first].cancelled
        next_is_due_in(10)
        clients.replace()
        second = cancel_newest()
        assert second not in world.ledger.messages
        clock.move(20)
        next_is_due_in(HOUR_MS)
        clients.publish()
        server.rest()
        third = max(world.ledger.messages)
        assert world.ledger.had_key_before == {second: first, third: second}


def test_a_seed_repeats_itself() -> None:
    first, second = (run_world(7) for _ in range(2))
    assert first.ledger.counts == second.ledger.counts
    assert first.counts == second.counts
    assert first.disk.list("messages") == second.disk.list("messages")


def test_the_worlds_are_not_empty() -> None:
    """A harness that does nothing finds nothing."""
    total: Counter[str] = Counter()
    for number in every(4, range(WORLDS)):
        total += counts_of(number)
    missing = [what for what in HAPPENS if total[what] < least(3)]
    assert len(missing) <= missing_max(HAPPENS), (missing, total)
