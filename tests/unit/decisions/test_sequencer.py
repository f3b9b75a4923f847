"""The sequencer: one order, overlays before the catalog, and a rollback that leaves nothing."""

from __future__ import annotations

import numpy as np
import pytest

from delayserver.decisions.group import Group
from delayserver.decisions.imported_keys import sort_keys
from delayserver.decisions.packing import ARRAYS_MIN, Publishes
from delayserver.decisions.sequencer import Sequencer
from delayserver.records.tables import (
    Change,
    ChangeState,
    KeyEntry,
    change_key,
    pack_change,
    pack_key_entries,
    pack_key_entry,
    unpack_change,
    unpack_key_entry,
)
from storage.catalog import Table
from storage.frame import crcs_of, seal, unseal
from storage.rows import MESSAGE_DTYPE, NO_KEY, RecordKind
from storage.staging import Keys
from tests.world.storage.catalog import MemoryCatalog

KEY = bytes(range(16))
OTHER_KEY = bytes(16 * [7])
MOVED = Change(ChangeState.MOVED, 9, 5_000, 0, 1)
CANCELLED = Change(ChangeState.CANCELLED, 9, 5_000, 0, 0)


@pytest.fixture
def catalog() -> MemoryCatalog:
    return MemoryCatalog()


@pytest.fixture
def sequencer(catalog: MemoryCatalog) -> Sequencer:
    return Sequencer(catalog, next_seq=10, subjects={"known": 1})


def rows_of(group: Group) -> np.ndarray:
    return np.frombuffer(b"".join(group.rows), MESSAGE_DTYPE)


@pytest.mark.parametrize("count", [1, 2, ARRAYS_MIN - 1, ARRAYS_MIN, 3 * ARRAYS_MIN])
@pytest.mark.parametrize("keyed", [False, True])
def test_many_publishes_stand_in_the_group_as_one_does(
    catalog: MemoryCatalog, sequencer: Sequencer, count: int, keyed: bool
) -> None:
    other = Sequencer(catalog, next_seq=10, subjects={"known": 1})
    bodies = [b"x" * (index % 5) + b"y" for index in range(count)]
    keys = [bytes([index % 200]) * 16 if index % 3 else NO_KEY for index in range(count)]
    for one in (sequencer, other):
        one.append(RecordKind.PUBLISH, payload=seal(b"before"))
    for index, body in enumerate(bodies):
        sequencer.append(
            RecordKind.PUBLISH,
            due_ms=1000 + index,
            target_due_ms=7 * index if keyed else 0,
            key_hash=keys[index] if keyed else NO_KEY,
            subject_id=1 + index % 2,
            payload=seal(body),
            flags=index % 2 if keyed else 1,
        )
    first_seq = other.append_publishes(
        Publishes(
            [1000 + index for index in range(count)],
            [1 + index % 2 for index in range(count)],
            bodies,
            crcs_of(bodies),
            keys if keyed else (),
            [7 * index for index in range(count)] if keyed else 0,
            [index % 2 for index in range(count)] if keyed else 1,
        )
    )
    assert first_seq == 11
    assert other.next_seq == sequencer.next_seq == 11 + count
    assert other.group.encode() == sequencer.group.encode()
    assert other.group.total_bytes == sequencer.group.total_bytes
    assert other.group.count == count + 1


def test_records_get_the_next_seqs_and_stand_in_the_group_as_they_will_on_disk(
    sequencer: Sequencer,
) -> None:
    body = seal(b"body")
    first = sequencer.append(
        RecordKind.PUBLISH, due_ms=77, key_hash=KEY, subject_id=3, payload=seal(b"x")
    )
    second = sequencer.append(
        RecordKind.RETRY,
        due_ms=88,
        message_seq=first,
        target_seq=first,
        target_due_ms=77,
        subject_id=3,
        subscription_id=4,
        payload=body,
        attempt=2,
    )
    assert (first, second, sequencer.next_seq) == (10, 11, 12)
    group = sequencer.close_group(now_ms=123)
    assert (group.first_seq, group.last_seq, group.created_ms) == (10, 11, 123)
    assert group.total_bytes == 2 * MESSAGE_DTYPE.itemsize + len(seal(b"x") + body)
    rows = rows_of(group)
    assert rows["seq"].tolist() == [10, 11]
    assert rows["message_seq"].tolist() == [10, 10]
    assert rows["due_ms"].tolist() == [77, 88]
    assert rows["target_seq"].tolist() == [0, 10]
    assert rows["target_due_ms"].tolist() == [0, 77]
    assert [bytes(key) for key in rows["key_hash"]] == [KEY, NO_KEY]
    assert rows["subject_id"].tolist() == [3, 3]
    assert rows["subscription_id"].tolist() == [0, 4]
    assert rows["attempt"].tolist() == [0, 2]
    assert rows["kind"].tolist() == [RecordKind.PUBLISH, RecordKind.RETRY]
    assert rows["payload_crc"].tolist() == [
        int.from_bytes(seal(b"x")[:4], "little"),
        int.from_bytes(body[:4], "little"),
    ]
    encoded_rows, blob = group.encode()
    assert encoded_rows == b"".join(group.rows)
    assert group.count == 2
    assert [
        unseal(blob[offset : offset + length])
        for offset, length in rows[["payload_offset", "payload_length"]].tolist()
    ] == [b"x", b"body"]
    assert group.payload(11) == (body, 3)


def test_closing_a_group_opens_the_next_one(sequencer: Sequencer) -> None:
    sequencer.append(RecordKind.CANCEL, target_seq=3)
    closed = sequencer.close_group(0)
    assert sequencer.group is not closed
    assert sequencer.append(RecordKind.CANCEL, target_seq=4) == sequencer.group.first_seq == 11
    assert closed.count == 1


def test_a_payload_is_found_in_the_open_group_and_later_ones_still_fit(
    sequencer: Sequencer,
) -> None:
    for text in (b"a", b"b"):
        sequencer.append(RecordKind.PUBLISH, subject_id=1, payload=seal(text))
    assert sequencer.group.payload(10) == (seal(b"a"), 1)
    sequencer.append(RecordKind.PUBLISH, subject_id=2, payload=seal(b"c"))
    assert sequencer.group.payload(12) == (seal(b"c"), 2)
    assert sequencer.group.encode()[1] == seal(b"a") + seal(b"b") + seal(b"c")


def test_a_new_subject_is_recorded_once(sequencer: Sequencer) -> None:
    assert sequencer.subject_id("known") == 1
    assert not sequencer.group.count
    assert sequencer.subject_id("new") == sequencer.subject_id("new") == 2
    assert sequencer.subject_names[2] == "new"
    rows = rows_of(sequencer.group)
    assert rows["kind"].tolist() == [RecordKind.SUBJECT]
    assert rows["subject_id"].tolist() == [2]
    assert sequencer.group.payload(10) == (seal(b"new"), 2)


def test_a_number_that_damage_took_away_is_not_given_to_two_subjects(
    catalog: MemoryCatalog,
) -> None:
    sequencer = Sequencer(catalog, next_seq=10, subjects={"second": 2, "fourth": 4})
    assert sequencer.subject_id("new") == 5
    assert sequencer.subject_id("fourth") == 4


def test_a_lookup_goes_overlay_then_catalog(catalog: MemoryCatalog, sequencer: Sequencer) -> None:
    old, new = KeyEntry(5, 1_000, 42), KeyEntry(10, 2_000, 43)
    catalog.commit(
        {
            Table.KEYS: [(KEY, pack_key_entry(5, 1_000, 42))],
            Table.CHANGES: [
                (change_key(5, 0), pack_change(MOVED)),
                (change_key(5, 2), pack_change(CANCELLED)),
                (change_key(6, 0), pack_change(CANCELLED)),
            ],
        }
    )
    assert sequencer.key(KEY) == old
    assert sequencer.key(OTHER_KEY) is None
    assert sequencer.changes(5) == {0: MOVED, 2: CANCELLED}
    assert not sequencer.has_fresh_change(5)
    sequencer.put_key(10, KEY, new)
    sequencer.put_change(11, 5, 0, CANCELLED)
    assert sequencer.key(KEY) == new
    assert sequencer.changes(5) == {0: CANCELLED, 2: CANCELLED}
    assert sequencer.has_fresh_change(5)
    sequencer.put_change(12, 5, 2, None)
    assert sequencer.changes(5) == {0: CANCELLED}
    assert sequencer.changes(7) == {}


def test_the_overlay_forgets_what_the_catalog_has_and_no_more(sequencer: Sequencer) -> None:
    # This catalog stays empty, so what is found stands in the overlay.
    first, second = KeyEntry(10, 1, 1), KeyEntry(12, 2, 2)
    sequencer.put_key(10, KEY, first)
    sequencer.put_key(11, OTHER_KEY, first)
    sequencer.prune(9)
    assert sequencer.key(KEY) == sequencer.key(OTHER_KEY) == first
    sequencer.put_key(12, KEY, second)
    sequencer.put_change(12, 5, 0, MOVED)
    sequencer.prune(11)
    assert sequencer.key(KEY) == second
    assert sequencer.key(OTHER_KEY) is None
    assert sequencer.has_fresh_change(5)
    sequencer.prune(12)
    assert sequencer.key(KEY) is None
    assert not sequencer.has_fresh_change(5)


def test_removals_are_known_until_they_are_filed(sequencer: Sequencer) -> None:
    cancel = sequencer.append(RecordKind.CANCEL, target_seq=3)
    sequencer.prune(0)
    move = sequencer.append(RecordKind.MOVE, target_seq=4)
    sequencer.append(RecordKind.RETRY, target_seq=5)
    assert sorted(sequencer.removed) == [3, 4]
    assert [sequencer.removed.get(target_seq) for target_seq in (3, 4, 5)] == [cancel, move, None]
    sequencer.prune(cancel)
    assert list(sequencer.removed) == [4]
    sequencer.prune(move)
    assert len(sequencer.removed) == 0


def test_a_rollback_leaves_no_trace(catalog: MemoryCatalog, sequencer: Sequencer) -> None:
    catalog.commit({Table.KEYS: [(KEY, pack_key_entry(5, 0, 0))]})
    kept = KeyEntry(10, 1_000, 1)
    sequencer.append(RecordKind.PUBLISH, key_hash=OTHER_KEY)
    sequencer.put_key(10, OTHER_KEY, kept)
    sequencer.put_change(10, 6, 0, MOVED)
    sequencer.close_group(0)  # this one is written

    def decide(text: str) -> None:
        subject_id = sequencer.subject_id(text)
        seq = sequencer.append(RecordKind.PUBLISH, key_hash=KEY, subject_id=subject_id)
        sequencer.put_key(seq, KEY, KeyEntry(seq, 2_000, 2))
        sequencer.put_key(seq, OTHER_KEY, KeyEntry(seq, 2_000, 2))
        cancel = sequencer.append(RecordKind.CANCEL, message_seq=6, target_seq=9)
        sequencer.put_change(cancel, 6, 0, CANCELLED)

    decide("one")
    failed = sequencer.close_group(0)
    decide("two")
    sequencer.roll_back([failed, sequencer.group])
    assert sequencer.key(KEY) == KeyEntry(5, 0, 0)
    assert sequencer.key(OTHER_KEY) == kept
    assert sequencer.changes(6) == {0: MOVED}
    assert len(sequencer.removed) == 0
    assert sequencer.subjects == {"known": 1}
    assert sequencer.subject_names == {1: "known"}
    assert sequencer.next_seq == sequencer.group.first_seq == 11
    assert not sequencer.group.count
    # The seqs are given again, and pruning does not stumble over what was undone.
    seq = sequencer.append(RecordKind.PUBLISH, key_hash=KEY)
    sequencer.put_key(seq, KEY, KeyEntry(seq, 3_000, 3))
    sequencer.prune(10)
    assert sequencer.key(KEY) == KeyEntry(11, 3_000, 3)


def test_values_of_the_catalog_come_back_as_they_were() -> None:
    entry = KeyEntry(1 << 40, 1 << 45, (1 << 64) - 1)
    change = Change(ChangeState.RETRYING, 1 << 40, 1 << 45, 65_535, (1 << 32) - 1)
    packed = pack_key_entry(entry.seq, entry.due_ms, entry.digest)
    assert unpack_key_entry(packed) == entry
    rows = np.zeros(2, MESSAGE_DTYPE)
    rows["seq"], rows["due_ms"] = [1, entry.seq], [2, entry.due_ms]
    many = pack_key_entries(rows, np.array([3, entry.digest], np.uint64))
    assert many.tolist() == [pack_key_entry(1, 2, 3), packed]
    assert unpack_change(pack_change(change)) == change
    assert change_key(1, 2) < change_key(1, 3) < change_key(2, 0) < change_key(256, 0)


@pytest.mark.parametrize("imports", [False, True])
def test_many_keys_are_looked_up_as_one_is(
    catalog: MemoryCatalog, sequencer: Sequencer, imports: bool
) -> None:
    hashes = [bytes([number]) * 16 for number in range(6)]
    old = [(one, pack_key_entry(number + 1, 100, 7)) for number, one in enumerate(hashes[:3])]
    catalog.commit({Table.KEYS: old})
    fresh = sequencer.append(RecordKind.PUBLISH, key_hash=hashes[1])
    sequencer.put_key(fresh, hashes[1], KeyEntry(fresh, 200, 8))
    if imports:
        numbers = np.arange(2)
        keys, _ = sort_keys(
            Keys(
                numbers.astype(np.uint32),
                np.frombuffer(b"".join(hashes[2:4]), "V16"),
                numbers + 300,
                numbers.astype(np.uint64),
                np.ones(2, np.uint32),
            )
        )
        sequencer.append_import(2, seal(b"import"), keys)
    asked = [*hashes[::-1], hashes[1], hashes[0]]
    seqs, dues_ms = sequencer.under_keys(asked)
    one_by_one = [sequencer.key(one) for one in asked]
    assert seqs.tolist() == [one.seq if one else 0 for one in one_by_one]
    assert dues_ms.tolist() == [one.due_ms if one else 0 for one in one_by_one]
    assert np.count_nonzero(seqs) == (6 if imports else 5)
    assert [len(column) for column in sequencer.under_keys([])] == [0, 0]


def test_of_many_cancels_each_shows_until_it_is_rolled_back(sequencer: Sequencer) -> None:
    seqs, dues_ms = np.array([3, 5], np.uint64), np.array([5_000, 6_000], np.int64)
    sequencer.append_cancels(seqs, dues_ms)
    assert sequencer.changes(5) == {0: Change(ChangeState.CANCELLED, 5, 6_000, 0, 0)}
    assert sequencer.has_fresh_change(3)
    assert sorted(sequencer.removed) == [3, 5]
    assert sequencer.unchanged(np.array([3, 4, 5], np.uint64)).tolist() == [False, True, False]
    sequencer.roll_back([sequencer.group])
    assert sequencer.unchanged(np.array([3, 4, 5], np.uint64)).all()
    assert (sequencer.changes(5), len(sequencer.removed)) == ({}, 0)
