"""The definitions log: appended to, written anew, cut back; and every call may fail."""

import contextlib
import random
from collections.abc import Iterator

import pytest

from storage.definitions_log import (
    DIRECTORY,
    Definition,
    DefinitionsLog,
    DefinitionsPlace,
    State,
    apply,
    definition_generations,
    definitions_in,
    definitions_path,
    encode_definitions,
    parse_definitions_name,
    scan_definitions,
)
from storage.errors import DiskError, DiskFullError
from storage.files import Files, size_of
from storage.frame import Damage, Frame
from tests.unit.storage.samples import content, overwrite
from tests.world.storage.faults import Fault, FaultKind, Faults, FaultyFiles, Moment, SimulatedCrash
from tests.world.storage.files import SimulatedFiles

STAMP = 77
SLACK_BYTES = 600


@pytest.fixture
def files() -> SimulatedFiles:
    return SimulatedFiles(rng=random.Random(0))


def log_on(files: Files, place: DefinitionsPlace | None = None) -> DefinitionsLog:
    log = DefinitionsLog(files, stamp=STAMP, slack_bytes=SLACK_BYTES)
    assert log.resume(place or DefinitionsPlace()) is None
    return log


def record(log: DefinitionsLog, seq: int, *changes: Definition) -> DefinitionsPlace:
    place = log.record(changes, seq)
    log.committed()
    return place


def state_of(files: Files, place: DefinitionsPlace) -> State:
    state: State = {}
    if place.generation:
        file = files.open(definitions_path(place.generation))
        for found in scan_definitions(file, place.length, stamp=STAMP):
            assert isinstance(found, Frame) and found.payload_intact, found
            apply(definitions_in(found), state)
        file.close()
    return state


def names(files: Files) -> list[str]:
    return files.list(DIRECTORY)


def test_names_of_generations() -> None:
    assert definitions_path(7) == "definitions/00000000000000000007.definitions"
    assert parse_definitions_name("00000000000000000007.definitions") == 7
    for other in ("7.definitions", "00000000000000000007.definitions.new", "x"):
        assert parse_definitions_name(other) is None


def test_changes_come_back(files: SimulatedFiles) -> None:
    log = log_on(files)
    record(log, 3, Definition(1, b"\0\0\0\1", b"orders"), Definition(4, b"", b"key"))
    place = record(log, 9, Definition(4, b"", None), Definition(2, b"\0\0\0\1", b""))
    assert state_of(files, place) == {(1, b"\0\0\0\1"): b"orders", (2, b"\0\0\0\1"): b""}
    file = files.open(definitions_path(1))
    frames = [f for f in scan_definitions(file, place.length, stamp=STAMP) if isinstance(f, Frame)]
    assert [(frame.first_seq, frame.last_seq) for frame in frames] == [(3, 3), (9, 9)]
    assert frames[1].rows["flags"].tolist() == [1, 0]
    assert place == DefinitionsPlace(1, size_of(files, definitions_path(1)), 0)


def test_a_checkpoint_that_defines_nothing_writes_nothing(files: SimulatedFiles) -> None:
    log = log_on(files)
    assert record(log, 3) == DefinitionsPlace()
    assert names(files) == []
    place = record(log, 4, Definition(1, b"a", b"b"))
    before = content(files, definitions_path(1))
    assert record(log, 5) == place
    assert content(files, definitions_path(1)) == before


def test_many_changes_are_several_frames() -> None:
    many = [Definition(3, bytes([n]), bytes(300_000)) for n in range(10)]
    frames = list(encode_definitions(many, seq=1, stamp=STAMP))
    assert len(frames) == 3


def test_a_log_that_has_grown_is_written_anew(files: SimulatedFiles) -> None:
    log, place, state = log_on(files), DefinitionsPlace(), State()
    generations = set()
    for seq in range(1, 200):
        change = Definition(1, bytes([seq % 5]), b"%d" % seq if seq % 3 else None)
        place = record(log, seq, change)
        apply([change], state)
        generations.add(place.generation)
        assert state_of(files, place) == state
        assert names(files) == [definitions_path(place.generation).rpartition("/")[2]]
        assert place.length <= 2 * place.base_length + SLACK_BYTES + 200
    assert len(generations) > 5
    assert definition_generations(files) == [place.generation]


def test_it_goes_on_after_a_start(files: SimulatedFiles) -> None:
    first = record(log_on(files), 1, Definition(1, b"a", b"1"))
    log = log_on(files, first)
    second = record(log, 2, Definition(1, b"b", b"2"))
    assert second.length > first.length
    assert state_of(files, second) == {(1, b"a"): b"1", (1, b"b"): b"2"}


def test_what_no_checkpoint_covers_is_removed(files: SimulatedFiles) -> None:
    log = log_on(files)
    place = record(log, 1, Definition(1, b"a", b"1"))
    log.record([Definition(1, b"lost", b"2")], 2)
    overwrite(files, definitions_path(9), 0, b"x")
    overwrite(files, definitions_path(2) + ".new", 0, b"x")
    overwrite(files, f"{DIRECTORY}/of somebody else", 0, b"x")
    log_on(files, place)
    assert size_of(files, definitions_path(1)) == place.length
    assert names(files) == ["00000000000000000001.definitions", "of somebody else"]


def test_what_is_missing_is_named_and_written_again(files: SimulatedFiles) -> None:
    place = record(log_on(files), 1, Definition(1, b"a", b"1"))
    file = files.open(definitions_path(1))
    file.truncate(place.length - 8)
    for length in (place.length - 8, 0):
        log = DefinitionsLog(files, stamp=STAMP)
        found = log.resume(place)
        assert found is not None and not found.torn
        assert (found.path, found.offset, found.end) == (definitions_path(1), length, place.length)
        files.unlink(definitions_path(1)) if length else None
    log.start_over(lambda: [Definition(1, b"a", b"1"), Definition(1, b"b", b"old")])
    place = record(log, 2, Definition(1, b"b", b"2"))
    assert place.generation == 2 and place.base_length == place.length
    assert state_of(files, place) == {(1, b"a"): b"1", (1, b"b"): b"2"}
    assert record(log, 3) == place


def test_a_commit_that_fails_is_tried_again_with_more(files: SimulatedFiles) -> None:
    log = log_on(files)
    first = Definition(1, b"a", b"1")
    before = log.record([first], 1)
    place = record(log, 2, first, Definition(1, b"b", b"2"))
    assert size_of(files, definitions_path(1)) == place.length
    assert state_of(files, place) == {(1, b"a"): b"1", (1, b"b"): b"2"}
    # The commit may have had its effect.
    assert state_of(files, before) == {(1, b"a"): b"1"}


def test_a_generation_stays_whose_commit_failed_until_one_has_not(files: SimulatedFiles) -> None:
    log, place, state = grown(files)
    changes = [Definition(1, b"b", b"2")]
    places = [place]
    while len({one.generation for one in places}) < 3:
        changes.append(Definition(1, b"c", b"%d" % len(places)))
        places.append(log.record(changes, 2))
    assert state_of(files, place) == state
    for count, one in enumerate(places[1:], 2):
        after = dict(state)
        apply(changes[:count], after)
        assert state_of(files, one) == after
    log.committed()
    assert definition_generations(files) == [places[-1].generation]


def grown(files: Files) -> tuple[DefinitionsLog, DefinitionsPlace, State]:
    """A log that the next record would write anew."""
    log, place, state = log_on(files), DefinitionsPlace(), State()
    while place.length <= SLACK_BYTES:
        place = record(log, 1, change := Definition(1, b"a", b"%d" % place.length))
        apply([change], state)
    return log, place, state


def test_a_full_disk_does_not_keep_it_from_going_on(files: SimulatedFiles) -> None:
    """What cannot be written anew is appended to; no newer generation is left beside it."""
    for call in range(1, 12):
        disk = SimulatedFiles(rng=random.Random(0))
        log, place, state = grown(disk)
        faults = Faults(Fault(call, FaultKind.NO_SPACE, Moment.AFTER))
        log._files = FaultyFiles(disk, faults)
        change = Definition(1, b"b", b"2")
        with contextlib.suppress(DiskFullError):
            place = record(log, 2, change)
            apply([change], state)
        assert state_of(disk, place) == state
        assert definition_generations(disk)[-1] == place.generation


def test_a_damaged_log_is_not_written_anew(files: SimulatedFiles) -> None:
    """What cannot be read would be lost for good; somebody may have a copy of the file."""
    log, place, _ = grown(files)
    overwrite(files, definitions_path(1), 70, b"\xff")
    after = record(log, 2, Definition(1, b"b", b"2"))
    assert after.generation == 1 and after.length > place.length
    assert log.damage is not None and log.damage.path == definitions_path(1)
    assert record(log, 3, Definition(1, b"c", b"3")).generation == 1


def torn_payload(files: SimulatedFiles, place: DefinitionsPlace) -> Iterator[object]:
    return scan_definitions(files.open(definitions_path(1)), place.length, stamp=STAMP)


def test_a_frame_whose_payloads_are_cut_is_torn(files: SimulatedFiles) -> None:
    place = record(log_on(files), 1, Definition(1, b"a", bytes(100)))
    overwrite(files, definitions_path(1), place.length - 50, b"\xff")
    (found,) = torn_payload(files, place)
    assert isinstance(found, Damage) and found.torn


@pytest.mark.parametrize("kind", [FaultKind.CRASH, FaultKind.NO_SPACE, FaultKind.IO_ERROR])
@pytest.mark.parametrize("moment", Moment)
def test_any_call_may_fail(kind: FaultKind, moment: Moment) -> None:
    """After any of them, the place that was committed last holds what was committed."""
    for call in range(1, 400, 3):
        disk = SimulatedFiles(rng=random.Random(call))
        faults = Faults(Fault(call, kind, moment))
        place, state = DefinitionsPlace(), State()
        pending: dict[bytes, Definition] = {}
        rng = random.Random(call)
        with contextlib.suppress(SimulatedCrash, DiskError):
            log = DefinitionsLog(FaultyFiles(disk, faults), stamp=STAMP, slack_bytes=100)
            log.resume(place)
            for seq in range(1, 40):
                key = bytes([rng.randrange(4)])
                pending[key] = Definition(1, key, b"%d" % seq if rng.random() < 0.8 else None)
                with contextlib.suppress(DiskFullError):
                    recorded = log.record(list(pending.values()), seq)
                    luck = rng.random()
                    if luck < 0.9:  # else the commit of the catalog fails
                        place = recorded
                        apply(pending.values(), state)
                    if luck < 0.8:  # else it has its effect, and nobody gets to know
                        pending.clear()
                        log.committed()
        disk = disk.crash()
        assert state_of(disk, place) == state, call
        log_on(disk, place)
        assert len(names(disk)) == bool(place.generation)
        if not faults.struck:
            return
    pytest.fail("the calls never came to an end")
