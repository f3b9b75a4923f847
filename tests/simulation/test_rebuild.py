"""The catalog follows from the logs: what a repair derives from them is what it held."""

import msgspec
import pytest

from delayserver.mend import Mender
from delayserver.message import Origin, Payload, decode_payload, encode_payload
from delayserver.rebuild import Rebuilt, content_digest
from delayserver.replay import DeadLetter
from delayserver.tables import read_checkpoint, read_hours, unpack_change
from delayserver.testing import World
from storage.catalog import Table
from storage.directory import open_identity
from storage.hour_log import hour_path
from storage.rows import HOUR_MS, LogKind

WORLDS = 12
LIVES = 5


def rebuilt_from(world: World) -> Rebuilt:
    """What the schedule log of a world tells, up to its checkpoint."""
    stamp = open_identity(world.disk, random_bytes=None).stamp
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


def content(letter: DeadLetter) -> Payload:
    """Its message, but for the attempt that would come next: a redrive begins with the first."""
    payload = decode_payload(letter.payload, "", 0, 0)
    assert payload.origin is not None
    origin = msgspec.structs.replace(payload.origin, attempt=1)
    return msgspec.structs.replace(payload, origin=origin)


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
    # What an event has completed watches nothing any more, and would be looked at in vain.
    watches = dict(world.catalog.scan(Table.WATCHES))
    assert watches.items() <= rebuilt.watches().items()
    letters = rebuilt.dead_letters()
    for key, value in world.catalog.scan(Table.DEAD_LETTERS):
        # Why and when it died is lost, and no more; those that were discarded come back.
        known, again = (
            msgspec.msgpack.decode(one, type=DeadLetter) for one in (value, letters[key])
        )
        assert again.attempts == known.attempts
        assert content(again) == content(known)


def test_the_worlds_have_something_to_tell() -> None:
    world = World(0)
    for _ in range(LIVES):
        world.live(150)
    tables = (Table.KEYS, Table.CHANGES, Table.WATCHES)
    assert all(list(world.catalog.scan(table)) for table in tables)


def test_a_trace_is_no_part_of_the_content() -> None:
    """Nor are origins: the digest of a key is that of what was published."""
    plain = Payload(b"{}", key="k", headers={"x-shop": "7"})
    trace = {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"}
    traced = msgspec.structs.replace(plain, headers={"x-shop": "7", **trace})
    moved = msgspec.structs.replace(traced, origin=Origin(1, 2, 3, 4))
    sealed = encode_payload(plain)
    digest = len(sealed) << 32 | int.from_bytes(sealed[:4], "little")
    for payload in (plain, traced, moved):
        assert content_digest(encode_payload(payload)) == digest
