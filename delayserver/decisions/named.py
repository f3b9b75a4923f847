"""Definitions under names, each with a state that moves on: as the catalog has them, or newer.

    put, take, run ──▶ overlays ──▶ (replay, a checkpoint) ──▶ two tables of the catalog
    find, page     ──▶ overlays, then those tables

Definition and state are two values, since a state changes with each step and a definition hardly
ever. Both stay packed: whoever has them knows what they mean. Schedules and sources are such.

Cost: 2 µs to find one; a page reads as many entries as it has. Threads: belongs to the event loop.
"""

from collections.abc import Callable
from itertools import islice
from typing import Final, NamedTuple

from delayserver.decisions.overlay import Overlay
from storage.catalog import Catalog, Table

GONE: Final = b""
"""In the overlays: there is none."""


class NamedEntry(NamedTuple):
    """What stands under a name."""

    name: str
    definition: bytes
    state: bytes


class NamedDefinitions:
    """What two tables of the catalog hold by name, and what changed since the last checkpoint."""

    def __init__(self, catalog: Catalog, definitions: Table, states: Table) -> None:
        self._catalog = catalog
        self._tables = definitions, states
        self._definitions: Overlay[str, bytes] = Overlay()
        self._states: Overlay[str, bytes] = Overlay()

    def find(self, name: str) -> NamedEntry | None:
        """What stands under a name now."""
        of_definitions, of_states = self._tables
        key = name.encode()
        state = self._states.get(name)
        if state is None:
            state = self._catalog.get(of_states, key)
        if not state:
            return None
        definition = self._definitions.get(name)
        if definition is None:
            definition = self._catalog.get(of_definitions, key)
        assert definition, name
        return NamedEntry(name, definition, state)

    def page(self, after: str, most: int) -> tuple[list[NamedEntry], str | None]:
        """Those behind that name, in the order of their names; and the name to go on behind (None:
        these were the last)."""
        fresh = {name for name in self._definitions if name > after}
        first = after.encode() + b"\0" if after else b""
        keys = (key for key, _ in self._catalog.scan(self._tables[0], first))
        stored = [key.decode() for key in islice(keys, most + len(fresh) + 1)]
        names = sorted({*stored, *fresh})
        if len(stored) > most + len(fresh):
            names = [name for name in names if name <= stored[-1]]
        found = [one for one in map(self.find, names) if one is not None]
        if len(found) <= most:
            return found, None
        return found[:most], found[most - 1].name

    def put(
        self, seq: int, name: str, definition: bytes | None, state: bytes
    ) -> list[Callable[[], None]]:
        """Record `seq` has brought it this far (GONE in both: it has ended). `definition`: None if
        that is as before. Returns how to undo it."""
        undo = [self._states.put(seq, name, state)]
        if definition is not None:
            undo.append(self._definitions.put(seq, name, definition))
        return undo

    def prune(self, through_seq: int) -> None:
        """The catalog holds everything up to `through_seq`."""
        self._definitions.prune(through_seq)
        self._states.prune(through_seq)
