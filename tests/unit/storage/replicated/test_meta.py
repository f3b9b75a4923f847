"""What a cluster is, and the numbers of its nodes: the same for everybody who reads the log."""

import json
import random
from typing import Any

import msgspec
import pytest

from storage.errors import (
    ClusterDiffersError,
    ClusterMissingError,
    EngineError,
    EngineSettingsError,
    FormatVersionError,
    NewerRecordError,
    RecordDamageError,
)
from storage.replicated.meta import NODES_MAX, AdoptRecord, ClusterMeta, MetaLog, make_identity
from tests.world.storage.engine import AppendOutcome, MemoryLog

IDENTITY = make_identity("c", 3, "fsync", random.Random(1).randbytes, 3)
OTHER = make_identity("c", 3, "fsync", random.Random(2).randbytes, 3)
DOCUMENT: dict[str, Any] = msgspec.to_builtins(IDENTITY)


def meta_of(*records: object) -> ClusterMeta:
    meta = ClusterMeta("c.meta/0")
    for offset, record in enumerate(records):
        meta.apply(offset, json.dumps(record).encode())
    return meta


def test_a_new_cluster() -> None:
    assert DOCUMENT.keys() == {
        "format",
        "cluster",
        "shards",
        "durability",
        "stamps",
        "id_secret",
        "link_secret",
        "replicas",
    }
    assert len(set(IDENTITY.stamps)) == 3
    assert all(0 < stamp < 1 << 32 for stamp in IDENTITY.stamps)
    assert (len(IDENTITY.id_secret), len(IDENTITY.link_secret)) == (32, 64)
    assert meta_of(DOCUMENT).identity == IDENTITY


def test_stamps_are_never_zero_and_never_alike() -> None:
    drawn = iter([bytes(4), bytes(4), b"\0\0\0\2", b"\0\0\0\2", b"\0\0\0\3", bytes(16), bytes(32)])
    assert make_identity("c", 3, "os", lambda _: next(drawn)).stamps == (1, 2, 3)


def test_only_every_disk_flushes() -> None:
    wanted = {"os": False, "fsync": False, "fsync-all": True}
    for durability, flushes in wanted.items():
        identity = make_identity("c", 1, durability, random.Random(3).randbytes)  # type: ignore[arg-type]
        assert identity.flushes == flushes


def test_the_first_of_two_counts() -> None:
    assert meta_of(DOCUMENT, msgspec.to_builtins(OTHER)).identity == IDENTITY
    # … whatever a newer version says later.
    assert meta_of(DOCUMENT, {"format": 9}).identity == IDENTITY


def test_numbers_of_nodes() -> None:
    meta = meta_of(DOCUMENT, {"node": "b"}, {"node": "a"}, {"node": "b"}, {"node": "c"})
    assert meta.nodes == {"b": 1, "a": 2, "c": 3}
    assert meta.next_offset == 5


@pytest.mark.parametrize(
    ("record", "error"),
    [
        ({"paint": "n1"}, NewerRecordError),
        ({}, NewerRecordError),
        ({"node": "n1", "rack": "a"}, NewerRecordError),
        ({"node": "n1", "zone": ""}, RecordDamageError),
        ({"node": "n1", "zone": "a b"}, RecordDamageError),
        ({**DOCUMENT, "replicas": 1}, RecordDamageError),
        ({**DOCUMENT, "replicas": "3"}, RecordDamageError),
        ({**DOCUMENT, "zones": 3}, NewerRecordError),
        ({**DOCUMENT, "format": 2}, FormatVersionError),
        ({**DOCUMENT, "format": "1"}, RecordDamageError),
        ({**DOCUMENT, "shards": 4}, RecordDamageError),
        ({**DOCUMENT, "shards": 0, "stamps": []}, RecordDamageError),
        ({**DOCUMENT, "stamps": [0, 1, 2]}, RecordDamageError),
        ({**DOCUMENT, "durability": "none"}, RecordDamageError),
        ({**DOCUMENT, "id_secret": "00"}, RecordDamageError),
        ({**DOCUMENT, "link_secret": "z" * 64}, RecordDamageError),
        ({**DOCUMENT, "link_secret": "0" * 64 + "\n"}, RecordDamageError),
        ({"format": 1}, RecordDamageError),
        ({"node": ""}, RecordDamageError),
        ({"node": "a/b"}, RecordDamageError),
        ({"node": "a\n"}, RecordDamageError),
        ({"node": 1}, RecordDamageError),
        ([], RecordDamageError),
    ],
)
def test_what_is_no_record(record: object, error: type[Exception]) -> None:
    meta = ClusterMeta("c.meta/0")
    with pytest.raises(error, match=r"c\.meta/0 at offset 0"):
        meta.apply(0, json.dumps(record).encode())
    assert (meta.identity, meta.nodes, meta.next_offset) == (None, {}, 0)


def test_what_is_no_json() -> None:
    for data in (b"", b"\xff", b"{"):
        with pytest.raises(RecordDamageError):
            ClusterMeta("c.meta/0").apply(0, data)


def test_more_nodes_than_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.replicated.meta.NODES_MAX", 2)
    with pytest.raises(RecordDamageError, match="2 nodes already"):
        meta_of({"node": "a"}, {"node": "b"}, {"node": "a"}, {"node": "c"})


# ---- on a log --------------------------------------------------------------------------------


def test_two_who_make_it_at_once() -> None:
    log = MemoryLog()
    first, second = MetaLog(log.another()), MetaLog(log.another())
    first.read(), second.read()
    assert first.create(IDENTITY) == (IDENTITY, True)
    # The second one has seen an empty log.
    second._append(msgspec.json.encode(OTHER))
    assert second.create(OTHER) == (IDENTITY, False)
    assert MetaLog(log.another()).read_cluster() == (IDENTITY, {})


def test_it_cannot_be_made_otherwise() -> None:
    log = MemoryLog()
    MetaLog(log).create(IDENTITY)
    for shards, durability, replicas in ((4, "fsync", 3), (3, "os", 3), (3, "fsync", 2)):
        another = make_identity("c", shards, durability, random.Random(4).randbytes, replicas)  # type: ignore[arg-type]
        with pytest.raises(ClusterDiffersError, match="cannot be changed"):
            MetaLog(log.another()).create(another)
        with pytest.raises(ClusterDiffersError):
            MetaLog(log.another()).refuse_another(another)
    assert log.end() == 1
    MetaLog(MemoryLog()).refuse_another(IDENTITY)


def test_nodes_register() -> None:
    log = MemoryLog()
    MetaLog(log).create(IDENTITY)
    assert [MetaLog(log.another()).register(name) for name in ("b", "a", "b")] == [1, 2, 1]
    assert log.end() == 3


def test_a_node_says_where_it_stands_and_may_be_moved() -> None:
    log = MemoryLog()
    MetaLog(log).create(IDENTITY)
    zones = []
    for zone in ("a", "a", None, "b"):
        assert MetaLog(log.another()).register("n", zone) == 1
        zones.append(MetaLog(log.another()).read().zones["n"])
    assert zones == ["a", "a", "", "b"]
    assert log.end() == 4, "what is known is not said again"
    assert log.read(2, 0)[0][1] == b'{"node":"n"}'
    with pytest.raises(EngineSettingsError, match="the zone 'a b'"):
        MetaLog(log).register("n", "a b")


def test_where_nothing_is_said_of_replicas_all_nodes_have_one() -> None:
    old = {name: value for name, value in DOCUMENT.items() if name != "replicas"}
    made = meta_of(old, {"node": "n1"})
    assert made.identity is not None
    assert made.identity.replicas == NODES_MAX
    assert made.zones == {"n1": ""}
    log = MemoryLog()
    log.append([json.dumps(old).encode()])
    assert MetaLog(log).create(IDENTITY) == (made.identity, False), "it is as it was, and no error"


def test_two_nodes_of_one_name_have_one_number() -> None:
    log = MemoryLog()
    MetaLog(log).create(IDENTITY)
    first, second = MetaLog(log.another()), MetaLog(log.another())
    first.read(), second.read()
    assert (first.register("n"), second.register("n"), second.register("m")) == (1, 1, 2)


@pytest.mark.parametrize(
    ("outcome", "number"), [(AppendOutcome.UNANSWERED, 2), (AppendOutcome.LOST, 2)]
)
def test_a_registration_that_is_not_answered(outcome: AppendOutcome, number: int) -> None:
    log = MemoryLog()
    MetaLog(log).create(IDENTITY)
    MetaLog(log).register("a")
    log.outcome = outcome
    with pytest.raises(EngineError, match="no answer came"):
        MetaLog(log).register("b")
    assert MetaLog(log.another()).register("b") == number


def test_no_cluster() -> None:
    with pytest.raises(ClusterMissingError, match="delayserver cluster create"):
        MetaLog(MemoryLog()).read_cluster()
    with pytest.raises(ClusterMissingError):
        MetaLog(MemoryLog()).register("a")


def test_a_name_that_is_none() -> None:
    log = MemoryLog()
    MetaLog(log).create(IDENTITY)
    with pytest.raises(EngineSettingsError, match="the node 'a b'"):
        MetaLog(log).register("a b")
    assert log.end() == 1


def test_what_people_decide_about_logs_that_have_lost_their_ends() -> None:
    first = {"adopt": 2, "of": "n1", "end": 900, "epoch": 8}
    second = {"adopt": 2, "of": "n2", "end": 950, "epoch": 11}
    meta = meta_of(DOCUMENT, first, {"adopt": 0, "of": "n1", "end": 0, "epoch": 1}, second)
    assert meta.adoptions[2] == [AdoptRecord(2, "n1", 900, 8), AdoptRecord(2, "n2", 950, 11)]
    assert meta.adoptions.keys() == {0, 2}
    log = MemoryLog("c.meta/0")
    MetaLog(log).say(AdoptRecord(2, "n1", 900, 8))
    assert MetaLog(log.another()).read().adoptions == {2: [AdoptRecord(2, "n1", 900, 8)]}
    for wrong in ({"end": -1}, {"epoch": 0}, {"of": "no name"}):
        with pytest.raises(RecordDamageError):
            meta_of(first | wrong)
