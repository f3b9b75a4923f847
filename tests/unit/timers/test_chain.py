"""The intrusive list."""

from __future__ import annotations

from delayserver.timers.chain import NOWHERE, Chain, ChainEntry
from delayserver.timers.interface import spent


def make(*ticks: int) -> tuple[Chain[ChainEntry], list[ChainEntry]]:
    chain: Chain[ChainEntry] = Chain()
    entries = [ChainEntry(spent, tick) for tick in ticks]
    for entry in entries:
        chain.append(entry)
    return chain, entries


def ticks(chain: Chain[ChainEntry]) -> list[int]:
    """The chain read forwards, after it was compared with the chain read backwards."""
    forwards = [entry.due_tick for entry in chain]
    backwards, entry = [], chain.prev
    while entry is not chain:
        backwards.append(entry.due_tick)
        entry = entry.prev
    assert backwards == forwards[::-1]
    return forwards


def test_keeps_the_order_of_arrival() -> None:
    chain, entries = make(3, 1, 2)
    assert ticks(chain) == [3, 1, 2]
    assert chain.pop_first() is entries[0]
    assert ticks(chain) == [1, 2]


def test_an_empty_chain_has_no_first() -> None:
    chain, _ = make()
    assert not chain
    assert chain.pop_first() is None
    assert ticks(chain) == []


def test_unlinks_the_first_the_last_and_the_only_one() -> None:
    chain, entries = make(1, 2, 3)
    entries[0].unlink()
    entries[2].unlink()
    assert ticks(chain) == [2]
    entries[1].unlink()
    assert not chain
    assert not any(entry.linked for entry in entries)
    assert all(entry.next is entry.prev is NOWHERE for entry in entries)


def test_takes_all_of_another_chain() -> None:
    chain, _ = make(1, 2)
    other, entries = make(3, 4)
    chain.take_all(other)
    assert (ticks(chain), ticks(other)) == ([1, 2, 3, 4], [])
    chain.take_all(other)
    entries[0].unlink()
    assert ticks(chain) == [1, 2, 4]
    other.take_all(chain)
    assert (ticks(chain), ticks(other)) == ([], [1, 2, 4])


def test_the_entry_at_hand_may_move_to_another_chain() -> None:
    chain, _ = make(1, 2, 3, 4)
    even: Chain[ChainEntry] = Chain()
    for entry in chain:
        if entry.due_tick % 2 == 0:
            entry.unlink()
            even.append(entry)
    assert (ticks(chain), ticks(even)) == ([1, 3], [2, 4])
