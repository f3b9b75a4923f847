"""Many cancels in one step. That they are those of one by one is tests/property/test_cancels.py."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any

import numpy as np
import pytest

from delayserver.decisions.cancels import FoundMessages, Refused
from delayserver.decisions.packing import MESSAGE_ROW
from delayserver.errors import NotFoundError, OverloadedError, StoppingError
from delayserver.records.ids import COLUMNS_MIN
from delayserver.records.message import State
from delayserver.records.message_id import MessageId
from delayserver.records.tables import Change, ChangeState, change_key, pack_change, pack_key_entry
from storage.catalog import Table
from storage.errors import DamageError
from storage.rows import HOUR_MS, MESSAGE_DTYPE, NO_KEY, RecordKind
from tests.unit.fakes import MINUTE_MS, START_MS, SUBJECT, MessageParts, message

LATER_MS = START_MS + 30 * MINUTE_MS
TOMORROW_MS = START_MS + 24 * HOUR_MS


@pytest.fixture
def parts() -> MessageParts:
    parts = MessageParts()
    parts.cancels.columns_min = 1
    return parts


def published(parts: MessageParts, *dues_ms: int) -> list[MessageId]:
    """Messages that are durable and filed."""
    new = [message(due_ms, key=f"k{index}") for index, due_ms in enumerate(dues_ms)]
    seqs = parts.publish(*new)
    parts.commit()
    parts.file()
    return [MessageId(0, due_ms, seq) for due_ms, seq in zip(dues_ms, seqs, strict=True)]


def cancel(
    parts: MessageParts, found: Sequence[MessageId], subject_ids: Sequence[int]
) -> dict[int, Refused]:
    """Why which of them was not cancelled."""
    return parts.cancels.cancel(
        np.array([one.seq for one in found], np.uint64),
        np.array([one.due_ms for one in found], np.int64),
        np.array(subject_ids, np.uint32),
    )


def listed(found: FoundMessages) -> list[MessageId | Refused]:
    """What was found in the place of each, or why nothing was."""
    assert found.refusals.keys() == set(np.flatnonzero(found.seqs == 0).tolist())
    ids = map(MessageId, repeat(0), found.dues_ms.tolist(), found.seqs.tolist())
    return [found.refusals.get(index, one) for index, one in enumerate(ids)]


def test_the_records_of_many_are_those_of_one_by_one(parts: MessageParts) -> None:
    found = published(parts, LATER_MS, TOMORROW_MS, LATER_MS)
    first = parts.sequencer.next_seq
    assert cancel(parts, found[::-1], [0] * 3) == {}
    group = parts.sequencer.group
    rows = np.frombuffer(group.encode()[0], MESSAGE_DTYPE)
    assert len(rows) == group.count == 3
    assert group.total_bytes == 3 * MESSAGE_ROW.size
    for seq, one, row in zip(range(first, first + 3), found, rows, strict=True):
        assert row.tolist() == (
            *(seq, 0, one.seq, one.seq, one.due_ms, NO_KEY, 0, 0, 0, 0, 0, 0),
            *(RecordKind.CANCEL, 0),
        )
    assert parts.ports.wakes == 2
    assert parts.commit() is group
    assert parts.hours.unsettled() == 0


def test_a_record_behind_them_has_the_next_seq_and_its_own_payload(parts: MessageParts) -> None:
    found = published(parts, LATER_MS, TOMORROW_MS)
    parts.publish(message(LATER_MS, body=b"before"))
    cancel(parts, found, [0, 0])
    [seq] = parts.publish(message(LATER_MS, body=b"behind"))
    assert seq == found[-1].seq + 4
    assert b"behind" in parts.sequencer.group.payload(seq)[0]
    assert parts.sequencer.group.payload(seq - 1) == (b"", 0)


def test_nothing_to_cancel_leaves_no_trace(parts: MessageParts) -> None:
    before = parts.trace()
    assert cancel(parts, [], []) == {}
    assert parts.trace() == before


def test_a_server_that_is_stopping_cancels_none_of_many(parts: MessageParts) -> None:
    found = published(parts, LATER_MS, TOMORROW_MS)
    before = parts.trace()
    parts.groups.stopping = True
    with pytest.raises(StoppingError):
        cancel(parts, found, [0, 0])
    assert parts.trace() == before
    assert parts.wheel.contains(found[0].seq, LATER_MS)


def test_a_group_that_is_full_takes_none_of_many(parts: MessageParts) -> None:
    found = published(parts, LATER_MS, TOMORROW_MS)
    parts.publish(message(LATER_MS, body=b"x" * (parts.settings.group_max_bytes - 1000)))
    many = [MessageId(0, TOMORROW_MS, 1000 + n) for n in range(20)]
    with pytest.raises(OverloadedError):
        cancel(parts, found + many, [0] * 22)
    assert parts.wheel.contains(found[0].seq, LATER_MS)
    assert parts.messages.locate(found[0].seq, LATER_MS).state is State.SCHEDULED


def test_messages_are_found_by_their_keys(parts: MessageParts) -> None:
    found = published(parts, LATER_MS, TOMORROW_MS)
    keys = [(SUBJECT, "k1"), (SUBJECT, "none"), ("other", "k1"), (SUBJECT, "k0"), (SUBJECT, "k1")]
    by_keys = listed(parts.cancels.by_keys(*zip(*keys, strict=True)))
    assert [by_keys[index] for index in (0, 3, 4)] == [found[1], found[0], found[1]]
    for index in (1, 2):
        assert isinstance(by_keys[index], NotFoundError)
        assert str(by_keys[index]) == _refusal_of_one(parts, *keys[index])


def _refusal_of_one(parts: MessageParts, subject: str, key: str) -> str:
    with pytest.raises(NotFoundError) as caught:
        parts.messages.by_key(subject, key)
    return str(caught.value)


def test_a_damaged_key_is_an_error_of_its_own(
    parts: MessageParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = published(parts, LATER_MS, TOMORROW_MS)
    damage = DamageError("catalog/data.mdb", 0, "an entry does not match its checksum")
    bad = parts.messages.key_hash(1, "k0")
    key = type(parts.sequencer).key

    def damaged_key(self: Any, key_hash: bytes) -> Any:
        if key_hash == bad:
            raise damage
        return key(self, key_hash)

    def damaged_keys(self: Any, key_hashes: Any) -> Any:
        raise damage

    monkeypatch.setattr(type(parts.sequencer), "key", damaged_key)
    monkeypatch.setattr(type(parts.sequencer), "under_keys", damaged_keys)
    by_keys = parts.cancels.by_keys([SUBJECT, SUBJECT], ["k0", "k1"])
    assert listed(by_keys) == [damage, found[1]]


def test_messages_are_found_by_their_ids(parts: MessageParts) -> None:
    found = published(parts, LATER_MS)
    text = parts.ids.encode(LATER_MS, found[0].seq)
    unborn = parts.ids.encode(LATER_MS, parts.sequencer.next_seq)
    assert listed(parts.cancels.by_ids([text, text.upper()])) == [found[0], found[0]]
    for bad in (unborn, "x", "", text[:-1] + ("0" if text[-1] != "0" else "1")):
        one, refusal = listed(parts.cancels.by_ids([text, bad]))
        assert one == found[0]
        assert isinstance(refusal, NotFoundError)
        assert repr(bad) in str(refusal)


def test_many_are_counted_for_their_subjects(parts: MessageParts) -> None:
    found = published(parts, LATER_MS, TOMORROW_MS, TOMORROW_MS)
    # Of the first its row in the wheel says it; of the last nobody.
    cancel(parts, found, [0, 1, 0])
    assert parts.messages.cancelled_by_subject == {1: 2, 0: 1}


@pytest.mark.parametrize("count", [COLUMNS_MIN - 1, COLUMNS_MIN])
def test_a_few_are_decided_one_by_one(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    parts = MessageParts()
    found = published(parts, *[TOMORROW_MS] * count)
    one_by_one = []
    cancel_one = parts.messages.cancel

    def noting(seq: int, due_ms: int, **named: Any) -> Any:
        one_by_one.append(seq)
        return cancel_one(seq, due_ms, **named)

    monkeypatch.setattr(parts.messages, "cancel", noting)
    assert cancel(parts, found, [1] * count) == {}
    assert len(one_by_one) == (count if count < COLUMNS_MIN else 0)
    assert parts.messages.cancelled_total == count


def test_what_only_the_catalog_knows_is_seen(parts: MessageParts) -> None:
    moved, cancelled, failed, plain = found = published(parts, *[TOMORROW_MS] * 4)
    key = pack_key_entry(plain.seq, TOMORROW_MS, 0)
    changes = {
        (moved.seq, 0): Change(ChangeState.MOVED, 77, LATER_MS + HOUR_MS, 0, 1),
        (cancelled.seq, 0): Change(ChangeState.CANCELLED, cancelled.seq, TOMORROW_MS, 0, 0),
        (failed.seq, 6): Change(ChangeState.RETRYING, 78, TOMORROW_MS, 2, 1),
    }
    parts.catalog.commit(
        {
            Table.CHANGES: [(change_key(*at), pack_change(one)) for at, one in changes.items()],
            Table.KEYS: [(parts.messages.key_hash(1, "k3"), key)],
        }
    )
    parts.sequencer.prune(plain.seq)
    assert listed(parts.cancels.by_keys([SUBJECT], ["k3"])) == [plain]
    seqs = np.array([one.seq for one in found], np.uint64)
    assert parts.sequencer.unchanged(seqs).tolist() == [False, False, False, True]
    assert cancel(parts, found, [1] * 4) == {}
    rows = np.frombuffer(parts.sequencer.group.encode()[0], MESSAGE_DTYPE)
    assert sorted(rows["target_seq"].tolist()) == sorted([77, failed.seq, plain.seq])
