"""The definitions log as a whole, and whether the catalog says the same.

`check` and the simulation hold the one against the other; `repair` builds either of them from the
other. A start reads none of it: it cuts the file back, and the catalog holds the same.

Cost: some 5 µs per row. Memory: every live entry. Threads: functions without state.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from delayserver.records.definitions import DEFINED_TABLES, read_definitions
from storage.catalog import Catalog
from storage.definitions_log import (
    State,
    apply,
    definitions_in,
    definitions_path,
    scan_definitions,
)
from storage.files import Files
from storage.frame import Damage


@dataclass(slots=True)
class Defined:
    """The entries in a generation of the definitions log."""

    state: State = field(default_factory=State)
    damage: list[Damage] = field(default_factory=list)
    """The parts of it that cannot be read; a torn tail apart."""
    last_seq: int = 0
    """Every effect of the records up to this one was durable when the last frame was written."""


def read_generation(
    files: Files, generation: int, *, stamp: int, end: int | None = None
) -> Defined:
    """The entries of a generation up to `end` (None: the end of its file). 0 is empty.

    Raises FileNotFoundError."""
    defined = Defined()
    if not generation:
        return defined
    file = files.open(definitions_path(generation))
    try:
        size = file.size()
        length = size if end is None else min(end, size)
        for found in scan_definitions(file, length, stamp=stamp):
            if isinstance(found, Damage):
                if not found.torn or end is not None:
                    defined.damage.append(found)
                continue
            apply(definitions_in(found), defined.state)
            defined.last_seq = max(defined.last_seq, found.last_seq)
            if not found.payload_intact:
                start = found.payload_start
                reason = found.unreadable or "payloads do not match their checksum"
                defined.damage.append(Damage(found.path, start, found.end, reason, torn=False))
    finally:
        file.close()
    return defined


def differences(state: State, catalog: Catalog) -> Iterator[str]:
    """Each disagreement between the catalog and a state of the definitions log, in words."""
    known: State = {(one.table, one.key): one.value or b"" for one in read_definitions(catalog)}
    for place in sorted(known.keys() | state.keys()):
        table, key = DEFINED_TABLES.get(place[0], place[0]), place[1].hex()
        if place not in state:
            yield f"{table}: entry {key} of the catalog is missing"
        elif place not in known:
            yield f"{table}: entry {key} is not in the catalog"
        elif state[place] != known[place]:
            yield f"{table}: entry {key} is another one in the catalog"
