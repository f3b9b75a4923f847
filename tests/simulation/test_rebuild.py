"""The catalog follows from the logs: what a repair derives from them is what it held."""

import msgspec
import numpy as np
import pytest

from delayserver.parts.installed import PARTS
from delayserver.records.content import content_digest, have_same_content
from delayserver.records.message import Origin, Payload, encode_payload
from delayserver.records.tables import (
    KEYS_AHEAD_KEY,
    read_checkpoint,
    read_definitions_place,
    read_hours,
    unpack_change,
    unpack_key_entry,
)
from delayserver.recovery.definitions import differences, read_generation
from delayserver.recovery.repair_catalog import Rebuilt, published_digest
from delayserver.recovery.repair_logs import Mender
from storage.buckets import bucket_path
from storage.catalog import Table
from storage.directory import open_identity
from storage.rows import HOUR_MS, LogKind
from tests.depth import every
from tests.stores import keys_of
from tests.world import World

WORLDS = 12
LIVES = 5


def rebuilt_from(world: World) -> Rebuilt:
    """What the schedule log of a world tells, up to its checkpoint."""
    stamp = open_identity(world.disk, random_bytes=None).stamp
    rebuilt = Rebuilt(PARTS)
    for hour, state in read_hours(world.catalog).items():
        mender = Mender(
            world.disk.open(bucket_path(LogKind.SCHEDULE, hour)),
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


@pytest.mark.parametrize("seed", every(4, range(WORLDS)))
def test_the_tables_are_the_same(seed: int) -> None:
    with World(seed) as world:
        # Nothing is purged, so that the log still tells of everything that the catalog holds.
        world.settings = world.settings.model_copy(update={"retention_ms": 10_000 * HOUR_MS})
        for _ in range(LIVES):
            world.live(150)
        while world.catalog.get(Table.META, KEYS_AHEAD_KEY) is not None:
            world.live(
                150
            )  # The end came between the slices of a checkpoint: keys are ahead of it.
        rebuilt = rebuilt_from(world)
        keys, known = rebuilt.keys(), keys_of(world.disk, world.catalog)
        assert keys.keys() == known.keys()
        pairs = [(unpack_key_entry(keys[key]), unpack_key_entry(known[key])) for key in keys]
        assert [(one.seq, one.due_ms) for one, _ in pairs] == [
            (one.seq, one.due_ms) for _, one in pairs
        ]
        # Of what was imported the payload tells more than its row did.
        digests = np.array([(one.digest, other.digest) for one, other in pairs], np.uint64)
        assert have_same_content(digests[:, 0], digests[:, 1]).all()
        changes = dict(world.catalog.scan(Table.CHANGES))
        derived = rebuilt.changes()
        assert derived.keys() == changes.keys()
        for key, value in changes.items():
            assert unpack_change(derived[key]) == unpack_change(value)
        # What an event has completed watches nothing any more, and would be looked at in vain.
        watches = dict(world.catalog.scan(Table.WATCHES))
        assert watches.items() <= rebuilt.watches().items()
        # All the rest stands in the definitions log: reasons, names, heartbeats, archives.
        place = read_definitions_place(world.catalog)
        assert place is not None
        stamp = open_identity(world.disk, random_bytes=None).stamp
        defined = read_generation(world.disk, place.generation, stamp=stamp, end=place.length)
        assert defined.damage == []
        assert list(differences(defined.state, world.catalog)) == []


def test_the_worlds_have_something_to_tell() -> None:
    with World(0) as world:
        for _ in range(LIVES):
            world.live(150)
        tables = (Table.CHANGES, Table.WATCHES, Table.SUBJECTS, Table.SUBSCRIPTIONS)
        assert keys_of(world.disk, world.catalog)
        assert all(list(world.catalog.scan(table)) for table in tables)


def test_a_trace_is_no_part_of_the_content() -> None:
    """Nor are origins: the digest of a key is that of what was published."""
    plain = Payload(b"{}", key="k", headers={"x-shop": "7"})
    trace = {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"}
    traced = msgspec.structs.replace(plain, headers={"x-shop": "7", **trace})
    moved = msgspec.structs.replace(traced, origin=Origin(1, 2, 3, 4))
    digest = content_digest(plain, encode_payload(plain))
    for payload in (plain, traced, moved):
        assert published_digest(encode_payload(payload)) == digest
