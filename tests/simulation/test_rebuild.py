"""The catalog follows from the logs: what a repair derives from them is what it held."""

import random

import msgspec
import pytest

from delayserver.mend import Mender
from delayserver.rebuild import Rebuilt
from delayserver.replay import DeadLetter, read_checkpoint, read_hours
from delayserver.sequencer import unpack_change
from delayserver.testing import World
from storage.catalog import Table
from storage.directory import open_identity
from storage.hour_log import hour_path
from storage.rows import HOUR_MS, LogKind

WORLDS = 12
LIVES = 5


def rebuilt_from(world: World) -> Rebuilt:
    """What the schedule log of a world tells, up to its checkpoint."""
    stamp = open_identity(world.disk, random_bytes=random.randbytes).stamp
    rebuilt = Rebuilt()
    for hour, state in read_hours(world.catalog).items():
        mender = Mender(
            world.disk.open(hour_path(LogKind.SCHEDULE, hour)),
            LogKind.SCHEDULE,
            hour,
            stamp=stamp,
            end=state.length,
            through_seq=read_checkpoint(world.catalog),
            changes={},
        )
        mended = mender.mend(None, rebuilt.hour())
        assert not mended.is_changed and not mended.dropped_rows
        mended.state.retired_ms = state.retired_ms
        assert mended.state == state
    return rebuilt


@pytest.mark.parametrize("seed", range(WORLDS))
def test_the_tables_are_the_same(seed: int) -> None:
    world = World(seed)
    # Nothing is purged, so that the log still tells of everything that the catalog holds.
    world.settings = world.settings.model_copy(update={"retention_ms": 10_000 * HOUR_MS})
    for _ in range(LIVES):
        world.live(150)
    rebuilt = rebuilt_from(world)
    assert rebuilt.keys() == dict(world.catalog.scan(Table.KEYS))
    changes = dict(world.catalog.scan(Table.CHANGES))
    derived = rebuilt.changes()
    assert derived.keys() == changes.keys()
    for key, value in changes.items():
        assert unpack_change(derived[key]) == unpack_change(value)
    letters = rebuilt.dead_letters()
    for key, value in world.catalog.scan(Table.DEAD_LETTERS):
        # Why and when it died is lost, and no more; those that were discarded come back.
        known, again = (
            msgspec.msgpack.decode(one, type=DeadLetter) for one in (value, letters[key])
        )
        assert (again.attempts, again.payload) == (known.attempts, known.payload)


def test_the_worlds_have_something_to_tell() -> None:
    world = World(0)
    for _ in range(LIVES):
        world.live(150)
    tables = (Table.KEYS, Table.CHANGES)
    assert all(list(world.catalog.scan(table)) for table in tables)
