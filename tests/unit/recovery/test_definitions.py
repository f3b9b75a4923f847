"""A generation of the definitions log as a whole, and beside the catalog."""

import pytest

from delayserver.recovery.definitions import differences, read_generation
from storage.catalog import Table
from storage.definitions_log import Definition, DefinitionsLog, DefinitionsPlace, definitions_path
from tests.unit.storage.samples import flip
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.files import SimulatedFiles

STAMP = 7


@pytest.fixture
def files() -> SimulatedFiles:
    return SimulatedFiles()


def filled(files: SimulatedFiles) -> list[DefinitionsPlace]:
    log, places = DefinitionsLog(files, stamp=STAMP), []
    log.resume(DefinitionsPlace())
    for seq in (1, 2, 3):
        changes = [Definition(4, b"%d" % number, bytes(seq)) for number in range(seq)]
        places.append(log.record(changes, seq))
        log.committed()
    log.close()
    return places


def test_it_is_read_up_to_a_place(files: SimulatedFiles) -> None:
    assert read_generation(files, 0, stamp=STAMP).state == {}
    for number, place in enumerate(filled(files), 1):
        defined = read_generation(files, 1, stamp=STAMP, end=place.length)
        assert defined.damage == [] and len(defined.state) == number
    assert read_generation(files, 1, stamp=STAMP).state == defined.state
    with pytest.raises(FileNotFoundError):
        read_generation(files, 2, stamp=STAMP)


def test_what_is_intact_around_damage_counts(files: SimulatedFiles) -> None:
    places = filled(files)
    flip(files, definitions_path(1), places[0].length)
    defined = read_generation(files, 1, stamp=STAMP)
    assert [(found.offset, found.end) for found in defined.damage] == [
        (places[0].length, places[1].length)
    ]
    assert defined.state == {(4, b"%d" % number): bytes(3) for number in range(3)}
    # Within a frame each payload stands for itself.
    flip(files, definitions_path(1), places[0].length)
    flip(files, definitions_path(1), places[2].length - 8)
    torn = read_generation(files, 1, stamp=STAMP)
    assert torn.damage == [] and torn.state[4, b"1"] == bytes(2)
    (found,) = read_generation(files, 1, stamp=STAMP, end=places[2].length).damage
    assert found.torn and found.offset == places[1].length
    flip(files, definitions_path(1), places[2].length - 8)
    flip(files, definitions_path(1), places[1].length - 8)
    (found,) = read_generation(files, 1, stamp=STAMP).damage
    assert found.reason == "payloads do not match their checksum"


def test_what_the_catalog_does_not_agree_on() -> None:
    catalog = MemoryCatalog()
    catalog.commit({Table.HEARTBEATS: [(b"a", b"1"), (b"b", b"2"), (b"c", b"3")]})
    state = {(4, b"a"): b"1", (4, b"b"): b"other", (6, b"d"): b""}
    assert list(differences(state, catalog)) == [
        "heartbeats: entry 62 is another one in the catalog",
        "heartbeats: entry 63 of the catalog is missing",
        "archives: entry 64 is not in the catalog",
    ]
